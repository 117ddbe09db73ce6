local member, bytes, token = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local window, keep, retention = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local limited, evict_before, encrypts = ARGV[7] == '1', tonumber(ARGV[8]), ARGV[9] == '1'
-- When the block was computed. What passes until it is written, on a slow link, is a part of its life.
local computed = now - (ARGV[10] or 0)

local used, held, lease, longest, tombstone = fields('used', 'held', 'lease', 'retention', 'tombstone')
if tombstone ~= 0 then
  return {'tombstone'}
end

local expiry = redis.call('ZSCORE', expiries, member)
if expiry then
  -- What is there in another form, as a tier left it that was deleted, could not be read: it makes room.
  local fits = redis.call('STRLEN', base .. member) == bytes and encrypted(member) == encrypts
  local alive = tonumber(expiry) > now and (longest == 0 or tonumber(expiry) <= now + longest)
  if alive and fits then
    use(member)
    return {'present'}
  end
  local freed = remove(member)
  add('used', -freed)
  used = math.max(0, used - freed)
end

local record = redis.call('HGET', reservations, member)
if record then
  local deadline, holder = string.match(record, '^%d+:(%d+):([^:]*)')
  if holder ~= token and tonumber(deadline) > now and tonumber(deadline) <= now + window then
    return {'present'}
  end
  -- A dead writer's, or this one's from an attempt whose answer was lost.
  local freed = release(member, record)
  add('held', -freed)
  held = math.max(0, held - freed)
end

local evicted, evicted_bytes, ages = 0, 0, ''
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
    evicted_bytes, evicted, ages = evict(missing, evict_before, 256)
    missing = missing - evicted_bytes
  end
  if missing > 0 then
    return {'short', whole(missing), evicted, whole(evicted_bytes), ages}
  end
end

redis.call('HSET', reservations, member, ARGV[2] .. ':' .. whole(now + window) .. ':' .. token .. ':' .. whole(computed))
redis.call('HINCRBY', state, 'held', ARGV[2])
if retention > longest then
  redis.call('HSET', state, 'retention', ARGV[6])
end
if redis.call('PTTL', state) < keep then
  live_for(2 * keep)
else
  redis.call('PEXPIREAT', reservations, whole(now + 2 * keep))
end
return {'ok', evicted, whole(evicted_bytes), ages}
