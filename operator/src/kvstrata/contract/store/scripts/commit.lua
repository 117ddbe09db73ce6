local member, token = ARGV[1], ARGV[2]
local ttl, age, keep = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
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
local passed = now - (tonumber(computed) or now) - age
if passed > 0 then
  ttl, age = ttl - passed, age + passed
end
add('held', -bytes)
local longest, cap, cap_until, tombstone = fields('retention', 'cap', 'cap_until', 'tombstone')
if longest > 0 then
  ttl = math.min(ttl, longest - age)
end
if cap > 0 and cap_until > now then
  ttl = math.min(ttl, cap - age)
end
if tombstone ~= 0 or ttl <= 0 or redis.call('STRLEN', value) ~= tonumber(bytes) then
  redis.call('UNLINK', value)
  return 'gone'
end

redis.call('PEXPIREAT', value, whole(now + ttl))
redis.call('ZADD', expiries, whole(now + ttl), member)
redis.call('ZADD', uses, whole(now), member)
redis.call('HSET', entries, member, bytes .. ':' .. whole(now - age))
add('used', tonumber(bytes))
recount(now + ttl, tonumber(bytes))
if redis.call('PTTL', expiries) < keep then
  live_for(2 * keep)
else
  lasts(uses)
end
return 'ok'
