-- Leases `minimum` to `wanted` bytes to a bucket. Beyond the minimum a lease grows by one part in `growth_share` of
-- itself at most (0: any), because buckets' reserves are lost to all other scopes. Answers `ok`, `exhausted`, `void`, or
-- `ungranted` if the tier, whose capacity is divided, has to grant more first; the bytes leased, the version, and of the
-- ledger the bytes leased out, its grant, and the number of the change that granted it.
local grant = redis.call('HMGET', ledger, 'room', 'turn')
local granted, sequence = tonumber(grant[1] or 0), grant[2] or '0'
local function answer(status, bytes)
  return {status, whole(bytes), whole(version), whole(leased), whole(granted), sequence}
end

if not live then
  return answer('void', 0)
end
if divided and granted < limit and granted - leased < minimum then
  return answer('ungranted', 0)
end
local free = (divided and math.min(limit, granted) or limit) - leased
if free < minimum then
  return answer('exhausted', 0)
end
local bytes = math.min(wanted, free)
if growth_share > 0 then
  local has = tonumber(redis.call('HGET', ledger, 'b:' .. bucket) or 0)
  bytes = math.min(bytes, minimum + math.floor(has / growth_share))
end
free_first()
redis.call('HINCRBY', ledger, 'b:' .. bucket, whole(bytes))
redis.call('HSET', ledger, 'leased', whole(leased + bytes), 'limit', whole(limit), 'at', whole(now))
if redis.call('PTTL', ledger) < keep_ms then
  redis.call('PEXPIREAT', ledger, whole(now + 2 * keep_ms))
end
return answer('ok', bytes)
