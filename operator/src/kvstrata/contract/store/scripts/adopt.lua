local lease, version = fields('lease', 'version')
if version >= tonumber(ARGV[1]) then
  return {'newer', whole(version)}
end
free_first()
redis.call('HSET', state, 'version', ARGV[1])
-- A bucket that nothing was ever stored in lives as long as its ledger; a tombstone, for ever.
if ARGV[2] and redis.call('PTTL', state) == -1 and fields('tombstone') == 0 then
  redis.call('PEXPIREAT', state, whole(now + 2 * ARGV[2]))
end
return {'ok', whole(lease)}
