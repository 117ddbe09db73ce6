local member, bytes, token = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local window, keep, retention = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local limited, evict_before = ARGV[7] == '1', tonumber(ARGV[8])

local used, held, lease, longest, tombstone = fields('used', 'held', 'lease', 'retention', 'tombstone')
if tombstone ~= 0 then
  return {'tombstone'}
end

local expiry = redis.call('ZSCORE', expiries, member)
if expiry then
  if tonumber(expiry) > now and redis.call('STRLEN', base .. member) > 0 then
    redis.pcall('ZADD', accesses, 'XX', whole(now), member)
    return {'present'}
  end
  local freed = remove(member)
  add('used', -freed)
  used = math.max(0, used - freed)
end

local record = redis.call('HGET', reservations, member)
if record then
  local deadline, holder = string.match(record, '^%d+:(%d+):(.*)$')
  if holder ~= token and tonumber(deadline) > now then
    return {'present'}
  end
  -- A dead writer's, or this one's from an attempt whose answer was lost.
  local freed = release(member, record)
  add('held', -freed)
  held = math.max(0, held - freed)
end

if limited then
  local missing = used + held + bytes - lease
  if missing > 0 then
    local _, dead = reap()
    held = math.max(0, held - dead)
    local _, late = expire(64)
    missing = missing - dead - late
  end
  -- Not in vain: what is held by other writers cannot be evicted.
  if missing > 0 and held + bytes <= lease then
    missing = missing - evict(missing, evict_before, 256)
  end
  if missing > 0 then
    local oldest = redis.call('ZRANGE', accesses, '0', '0', 'WITHSCORES')
    return {'short', whole(missing), oldest[2] or ''}
  end
end

redis.call('HSET', reservations, member, ARGV[2] .. ':' .. whole(now + window) .. ':' .. token)
redis.call('HINCRBY', state, 'held', ARGV[2])
if retention > longest then
  redis.call('HSET', state, 'retention', ARGV[6])
end
if redis.call('PTTL', state) < keep then
  live_for(2 * keep)
else
  redis.call('PEXPIREAT', reservations, whole(now + 2 * keep))
end
return {'ok'}
