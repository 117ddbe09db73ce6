-- Puts a rebuilt ledger into use, with the lease of each bucket. Answers `live`, or `void` if it cannot; the version.
if live or not void or not is_own or version ~= of_version then
  return {live and 'live' or 'void', whole(version)}
end
redis.call('HDEL', ledger, 'void')
leased = 0
for i, lease in ipairs(leases) do
  leased = leased + tonumber(lease)
  redis.call('HSET', ledger, 'b:' .. whole(i - 1), lease)
end
redis.call('HSET', ledger, 'leased', whole(leased), 'at', whole(now))
redis.call('PEXPIREAT', ledger, whole(now + 2 * keep_ms))
return {'live', whole(version)}
