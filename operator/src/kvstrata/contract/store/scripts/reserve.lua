-- Reserves a block's bytes, evicting blocks last used before `evict_before_ms` if needed. Answers `ok`, `present`,
-- `tombstone` or `short`; bytes missing, blocks evicted, their bytes and their ages.
local evicted, evicted_bytes, ages = 0, 0, ''
local function answer(status, missing)
  return {status, whole(missing or 0), evicted, whole(evicted_bytes), ages}
end

local used, held, lease, longest, tombstone = fields('used', 'held', 'lease', 'retention', 'tombstone')
if tombstone ~= 0 then
  return answer('tombstone')
end

local expiry = redis.call('ZSCORE', expiries, member)
if expiry then
  -- A value in another form, left by a deleted tier, could not be read: it makes room.
  local fits = redis.call('STRLEN', base .. member) == size and encrypted(member) == encrypts
  local alive = tonumber(expiry) > now and (longest == 0 or tonumber(expiry) <= now + longest)
  if alive and fits then
    use(member)
    return answer('present')
  end
  local freed = remove(member)
  add('used', -freed)
  used = math.max(0, used - freed)
end

local record = redis.call('HGET', reservations, member)
if record then
  local deadline, holder = string.match(record, '^%d+:(%d+):([^:]*)')
  if holder ~= token and tonumber(deadline) > now and tonumber(deadline) <= now + window_ms then
    return answer('present')
  end
  -- A dead writer's, or this one's from an attempt whose answer was lost.
  local freed = release(member, record)
  add('held', -freed)
  held = math.max(0, held - freed)
end

if limited then
  local missing = used + held + size - lease
  if missing > 0 then
    local _, dead = reap()
    held = math.max(0, held - dead)
    local _, late = expire(64)
    missing = missing - dead - late
  end
  -- Only where it helps: reservations of other writers cannot be evicted.
  if missing > 0 and held + size <= lease then
    evicted_bytes, evicted, ages = evict(missing, evict_before_ms, 256)
    missing = missing - evicted_bytes
  end
  if missing > 0 then
    return answer('short', missing)
  end
end

-- The time until the block is written, on a slow link, is a part of its life.
record = string.format('%.0f:%.0f:%s:%.0f', size, now + window_ms, token, now - age_ms)
redis.call('HSET', reservations, member, record)
redis.call('HINCRBY', state, 'held', whole(size))
if life_ms > longest then
  redis.call('HSET', state, 'retention', whole(life_ms))
end
if redis.call('PTTL', state) < keep_ms then
  live_for(2 * keep_ms)
else
  redis.call('PEXPIREAT', reservations, whole(now + 2 * keep_ms))
end
return answer('ok')
