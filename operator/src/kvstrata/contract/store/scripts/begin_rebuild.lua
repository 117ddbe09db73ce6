-- Voids a ledger to rebuild it under a new version. Answers `live` if it was rebuilt since version `seen`, `busy` if
-- another process began less than `patience_ms` ago, otherwise `void`; and the version.
if live and version ~= seen then
  return {'live', whole(version)}
end
local since = now - at
if void and is_own and since >= 0 and since < patience_ms then
  return {'busy', whole(version)}
end
-- A version of its own for every attempt: a bucket reports its lease once for each, at the instant at which it adopts
-- it, so bytes yielded before are in that lease and bytes yielded after can be returned. Versions begin at microseconds:
-- no two ledgers that were lost begin at the same.
version = math.max(version + 1, at_least, clock[1] * 1000000 + clock[2])
redis.call('UNLINK', ledger)
redis.call('HSET', ledger, 'v', whole(version), 'void', '1', 'replid', replication, 'at', whole(now))
redis.call('PEXPIREAT', ledger, whole(now + 60000))
return {'void', whole(version)}
