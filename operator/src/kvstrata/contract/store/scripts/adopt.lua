-- Adopts a ledger's version. Answers `ok` and the lease under it, or `newer` and the bucket's version.
local lease, version = fields('lease', 'version')
if version >= of_version then
  return {'newer', whole(version)}
end
free_first()
redis.call('HSET', state, 'version', whole(of_version))
-- A bucket that nothing was ever stored in lives as long as its ledger; a tombstone does not expire.
if redis.call('PTTL', state) == -1 and fields('tombstone') == 0 then
  redis.call('PEXPIREAT', state, whole(now + 2 * keep_ms))
end
return {'ok', whole(lease)}
