-- What the scripts of a bucket have in common. KEYS[1] is `<bucket>:#s`.
local state = KEYS[1]
local base = string.sub(state, 1, -3)
local expiries, accesses = base .. '#x', base .. '#a'
local entries, reservations = base .. '#m', base .. '#r'
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- Lua would write large numbers with an exponent.
local function whole(number)
  return string.format('%.0f', number)
end

local function fields(...)
  local values = redis.call('HMGET', state, ...)
  for i = 1, #values do
    values[i] = tonumber(values[i] or 0)
  end
  return unpack(values)
end

-- On a full server the first write of a script must be one that takes no memory; then all others are allowed.
local function free_first()
  redis.call('HDEL', state, '-')
end

local function add(name, amount)
  if amount ~= 0 and redis.call('HINCRBY', state, name, whole(amount)) < 0 then
    redis.call('HSET', state, name, '0')
  end
end

local function size_of(record)
  return tonumber(string.match(record, '^(%d+):'))
end

-- Takes a block out, value and index; returns its bytes, by which the caller lowers `used`.
local function remove(member)
  redis.call('UNLINK', base .. member)
  redis.call('ZREM', expiries, member)
  redis.call('ZREM', accesses, member)
  local entry = redis.call('HGET', entries, member)
  if not entry then
    return 0
  end
  redis.call('HDEL', entries, member)
  return size_of(entry)
end

-- Ends a reservation, and the value that may have been written under it; returns its bytes, for `held`.
local function release(member, record)
  redis.call('HDEL', reservations, member)
  if not redis.call('ZSCORE', expiries, member) then
    redis.call('UNLINK', base .. member)
  end
  return size_of(record)
end

-- Ends the reservations of writers that did not finish in time; returns how many and their bytes.
local function reap()
  local count, freed = 0, 0
  local all = redis.call('HGETALL', reservations)
  for i = 1, #all, 2 do
    if tonumber(string.match(all[i + 1], '^%d+:(%d+):')) <= now then
      freed = freed + release(all[i], all[i + 1])
      count = count + 1
    end
  end
  add('held', -freed)
  return count, freed
end

-- Takes out at most `count` blocks that have expired; returns how many and their bytes.
local function expire(count)
  local freed = 0
  local late = redis.call('ZRANGE', expiries, '-inf', whole(now), 'BYSCORE', 'LIMIT', '0', whole(count))
  for i = 1, #late do
    freed = freed + remove(late[i])
  end
  add('used', -freed)
  return #late, freed
end

-- Takes out blocks, least recently used first, that were last used before `before`, until `wanted` bytes are free.
local function evict(wanted, before, count)
  local freed = 0
  while freed < wanted and count > 0 do
    local oldest = redis.call('ZRANGE', accesses, '0', '0', 'WITHSCORES')
    if #oldest == 0 or tonumber(oldest[2]) >= before then
      break
    end
    freed = freed + remove(oldest[1])
    count = count - 1
  end
  add('used', -freed)
  return freed
end

-- An index outlives its blocks for a while, and then nobody has to remember it: all of it goes at one moment.
local function live_for(milliseconds)
  local moment = whole(now + milliseconds)
  for _, key in ipairs({state, reservations, entries, expiries, accesses}) do
    redis.call('PEXPIREAT', key, moment)
  end
end
