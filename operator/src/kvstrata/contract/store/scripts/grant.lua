local wanted, minimum, limit = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
if not live then
  return {'void', whole(version)}
end
-- In a tier whose capacity is divided, a scope leases out no more than the tier gave it.
if ARGV[6] == '1' then
  local shared = redis.call('HMGET', ledger, 'room', 'turn')
  local given = tonumber(shared[1] or 0)
  if given < limit and given - leased < minimum then
    return {'unshared', whole(leased), whole(given), shared[2] or '0'}
  end
  limit = math.min(limit, given)
end
local room = limit - leased
if room < minimum then
  return {'exhausted', whole(math.max(0, room))}
end
local granted = math.min(wanted, room)
-- Buckets grow in proportion: what each has in reserve is lost to all other scopes.
if tonumber(ARGV[7] or 0) > 0 then
  local has = tonumber(redis.call('HGET', ledger, 'b:' .. ARGV[1]) or 0)
  granted = math.min(granted, minimum + math.floor(has / ARGV[7]))
end
free_first()
redis.call('HINCRBY', ledger, 'b:' .. ARGV[1], whole(granted))
redis.call('HSET', ledger, 'leased', whole(leased + granted), 'limit', ARGV[4], 'at', whole(now))
if redis.call('PTTL', ledger) < tonumber(ARGV[5]) then
  redis.call('PEXPIREAT', ledger, whole(now + 2 * ARGV[5]))
end
return {'ok', whole(granted), whole(version)}
