-- Makes a reserved block readable. Answers `ok`, or `gone`.
local value = base .. member

local bytes, holder, computed
local record = redis.call('HGET', reservations, member)
if record then
  bytes, holder, computed = string.match(record, '^(%d+):%d+:([^:]*):?(%d*)$')
end
if holder ~= token then
  local expiry = redis.call('ZSCORE', expiries, member)
  if expiry then
    -- The late SET of this writer wrote the same block over a committed one: its life is the committed one's.
    redis.call('PEXPIREAT', value, whole(math.ceil(tonumber(expiry))))
    local entry = redis.call('HGET', entries, member)
    if not entry or redis.call('STRLEN', value) ~= size_of(entry) then
      -- In another form: it had another key, or none.
      add('used', -remove(member))
    end
  elseif not record then
    redis.call('UNLINK', value)
  end
  return 'gone'
end

redis.call('HDEL', reservations, member)
local passed = now - (tonumber(computed) or now) - age_ms
if passed > 0 then
  ttl_ms, age_ms = ttl_ms - passed, age_ms + passed
end
add('held', -bytes)
local longest, cap, cap_until, tombstone = fields('retention', 'cap', 'cap_until', 'tombstone')
if longest > 0 then
  ttl_ms = math.min(ttl_ms, longest - age_ms)
end
if cap > 0 and cap_until > now then
  ttl_ms = math.min(ttl_ms, cap - age_ms)
end
if tombstone ~= 0 or ttl_ms <= 0 or redis.call('STRLEN', value) ~= tonumber(bytes) then
  redis.call('UNLINK', value)
  return 'gone'
end

redis.call('PEXPIREAT', value, whole(now + ttl_ms))
redis.call('ZADD', expiries, whole(now + ttl_ms), member)
redis.call('ZADD', uses, whole(now), member)
redis.call('HSET', entries, member, bytes .. ':' .. whole(now - age_ms))
add('used', tonumber(bytes))
recount(now + ttl_ms, tonumber(bytes))
if redis.call('PTTL', expiries) < keep_ms then
  live_for(2 * keep_ms)
else
  lasts(uses)
end
return 'ok'
