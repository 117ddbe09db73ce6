if ARGV[1] == 'begin' then
  local seen, at_least = tonumber(ARGV[2]), tonumber(ARGV[3])
  if live and version ~= seen then
    return {'live', whole(version)}
  end
  local since = now - (known[5] or 0)
  if known[2] and known[3] == replication and since >= 0 and since < tonumber(ARGV[4]) then
    return {'busy', whole(version)}
  end
  -- A version of its own for every attempt: a bucket tells its lease once for each, at the instant at which it adopts
  -- it, and so what is yielded before is in that lease and what is yielded after can be returned.
  version = math.max(version + 1, at_least, beginning)
  redis.call('UNLINK', ledger)
  redis.call('HSET', ledger, 'v', whole(version), 'void', '1', 'replid', replication, 'at', whole(now))
  redis.call('PEXPIREAT', ledger, whole(now + 60000))
  return {'void', whole(version)}
end

if live or not known[2] or known[3] ~= replication or version ~= tonumber(ARGV[2]) then
  return {live and 'live' or 'void', whole(version)}
end
redis.call('HDEL', ledger, 'void')
leased = 0
for i = 4, #ARGV do
  leased = leased + tonumber(ARGV[i])
  redis.call('HSET', ledger, 'b:' .. whole(i - 4), ARGV[i])
end
redis.call('HSET', ledger, 'leased', whole(leased), 'at', whole(now))
redis.call('PEXPIREAT', ledger, whole(now + 2 * ARGV[3]))
return {'live', whole(version)}
