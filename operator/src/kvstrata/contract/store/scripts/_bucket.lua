-- Common part of a bucket's scripts. KEYS[1] is `<bucket>:#s`.
local state = KEYS[1]
local base = string.sub(state, 1, -3)
local expiries, entries, reservations = base .. '#x', base .. '#m', base .. '#r'
local uses = base .. '#a'

-- A server serves no other client while a script runs. A script with more to do after so many microseconds leaves it to
-- the next call. Which clock advances meanwhile is up to the server: newer ones stop TIME and offer one of their work.
local longest_us = 2000
local work = rawget(_G, 'os')
local began = work and work.clock and work.clock()
local function is_over()
  if began then
    return (work.clock() - began) * 1000000 >= longest_us
  end
  local moment = redis.call('TIME')
  return (moment[1] - clock[1]) * 1000000 + moment[2] - clock[2] >= longest_us
end

local function fields(...)
  local values = redis.call('HMGET', state, ...)
  for i = 1, #values do
    values[i] = tonumber(values[i] or 0)
  end
  return unpack(values)
end

-- How far a recount that takes several calls has come: up to which expiry, false without one.
local recounted
local function counted_until()
  if recounted == nil then
    recounted = tonumber(redis.call('HGET', state, 'rc_at') or '') or false
  end
  return recounted
end

-- Entries that a recount has passed still change, and so does its sum.
local function recount(expiry, amount)
  if counted_until() and expiry and tonumber(expiry) <= recounted then
    redis.call('HINCRBY', state, 'rc_sum', whole(amount))
  end
end

local function add(name, amount)
  if amount == 0 then
    return
  end
  if redis.call('HINCRBY', state, name, whole(amount)) < 0 then
    redis.call('HSET', state, name, '0')
  end
  if name == 'used' and counted_until() then
    redis.call('HINCRBY', state, 'rc_used', whole(amount))
  end
end

local function size_of(record)
  return tonumber(string.match(record, '^(%d+):'))
end

-- Whether a value's body is encrypted, by a byte of its header: see block_value.py.
local function encrypted(member)
  return redis.call('GETRANGE', base .. member, '4', '4') == '\1'
end

-- Takes a block out, value and index; returns its bytes, by which the caller lowers `used`, and when it was computed.
local function remove(member)
  redis.call('UNLINK', base .. member)
  local expiry = counted_until() and redis.call('ZSCORE', expiries, member)
  redis.call('ZREM', expiries, member)
  redis.call('ZREM', uses, member)
  local entry = redis.call('HGET', entries, member)
  if not entry then
    return 0
  end
  redis.call('HDEL', entries, member)
  recount(expiry, -size_of(entry))
  return size_of(entry), tonumber(string.match(entry, '^%d+:(%d+)'))
end

-- A set that was created just now lives as long as the rest of its bucket.
local function lasts(key)
  if redis.call('PTTL', key) == -1 then
    local left = redis.call('PTTL', state)
    if left > 0 then
      redis.call('PEXPIREAT', key, whole(now + left))
    end
  end
end

-- A committed block was used; returns 1 if it is there.
local function use(member)
  free_first()
  return redis.call('ZADD', uses, 'XX', 'CH', whole(now), member)
end

-- Ends a reservation, and the value that may have been written under it; returns its bytes, for `held`.
local function release(member, record)
  redis.call('HDEL', reservations, member)
  if not redis.call('ZSCORE', expiries, member) then
    redis.call('UNLINK', base .. member)
  end
  return size_of(record)
end

-- No reservation is given more time than this. One that has more, and an entry that lives longer than anything in here
-- was given, are from before the server's clock was set back.
local longest_write = 60000

-- Ends the reservations of writers that did not finish in time, a step of them; returns how many, their bytes and where
-- to continue.
local function reap(cursor)
  local count, freed = 0, 0
  local found = redis.call('HSCAN', reservations, cursor or '0', 'COUNT', '256')
  local all = found[2]
  for i = 1, #all, 2 do
    local deadline = tonumber(string.match(all[i + 1], '^%d+:(%d+):'))
    if deadline <= now or deadline > now + longest_write then
      freed = freed + release(all[i], all[i + 1])
      count = count + 1
    end
  end
  add('held', -freed)
  return count, freed, found[1]
end

-- Takes out at most `count` blocks that have expired; returns how many and their bytes.
local function expire(count)
  local freed = 0
  local late = redis.call('ZRANGE', expiries, '-inf', whole(now), 'BYSCORE', 'LIMIT', '0', whole(count))
  local longest = fields('retention')
  if longest > 0 and #late < count then
    local beyond = '(' .. whole(now + longest)
    local left = whole(count - #late)
    for _, member in ipairs(redis.call('ZRANGE', expiries, beyond, '+inf', 'BYSCORE', 'LIMIT', '0', left)) do
      late[#late + 1] = member
    end
  end
  for i = 1, #late do
    freed = freed + remove(late[i])
  end
  add('used', -freed)
  return #late, freed
end

-- Takes out blocks that were last used before `before`, the least recently used first, until `wanted` bytes are free;
-- returns bytes, number, and how many milliseconds ago each was computed, with spaces between.
local function evict(wanted, before, count)
  local freed, number, ages = 0, 0, {}
  while freed < wanted and number < count do
    local oldest = redis.call('ZRANGE', uses, '0', '0', 'WITHSCORES')
    if #oldest == 0 or tonumber(oldest[2]) >= before then
      break
    end
    local bytes, computed = remove(oldest[1])
    freed = freed + bytes
    if computed then
      ages[#ages + 1] = whole(math.max(0, now - computed))
    end
    number = number + 1
  end
  add('used', -freed)
  return freed, number, table.concat(ages, ' ')
end

-- An index outlives its blocks; then all of it expires at one moment.
local function live_for(milliseconds)
  local moment = whole(now + milliseconds)
  for _, key in ipairs({state, reservations, entries, expiries, uses}) do
    redis.call('PEXPIREAT', key, moment)
  end
end
