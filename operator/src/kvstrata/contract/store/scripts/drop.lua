-- One step of a deletion: removes as many blocks as it has time for, `count` and 256 at most. 0 leaves a tombstone and
-- removes values that are not readable yet. Answers blocks removed, left, their bytes, values deleted since the
-- tombstone, their bytes, and milliseconds since then.
count = math.min(count, 256)
free_first()
redis.call('HSET', state, 'tombstone', '1')
if redis.call('HEXISTS', state, 'dropped_from') == 0 then
  redis.call('HSET', state, 'dropped_from', whole(now))
end

-- The tombstone counts deletions: a job that continues after a killed one reports the same.
local removed, values, bytes = 0, 0, 0
local function weigh(member)
  local size = redis.call('STRLEN', base .. member)
  if size > 0 then
    values, bytes = values + 1, bytes + size
  end
  return size
end

local all = redis.call('HSCAN', reservations, '0', 'COUNT', '256')[2]
local ended = 0
for i = 1, #all, 2 do
  -- Committed values are deleted with their index.
  if not redis.call('ZSCORE', expiries, all[i]) then
    weigh(all[i])
  end
  ended = ended + release(all[i], all[i + 1])
  if is_over() then
    break
  end
end
add('held', -ended)
-- The first of these in few calls, because each of them costs; fewer of large values, whose memory is given back
-- meanwhile. Returns how many.
local function remove_some(members)
  local some, names, freed, weight = {}, {}, 0, 0
  for i = 1, math.min(#members, 32) do
    local member = members[i]
    some[i], names[i] = member, base .. member
    weight = weight + weigh(member)
    if counted_until() then
      local entry = redis.call('HGET', entries, member)
      recount(redis.call('ZSCORE', expiries, member), entry and -size_of(entry) or 0)
    end
    if weight >= 16777216 then
      break
    end
  end
  for _, entry in ipairs(redis.call('HMGET', entries, unpack(some))) do
    freed = freed + (entry and size_of(entry) or 0)
  end
  redis.call('UNLINK', unpack(names))
  for _, index in ipairs({expiries, uses}) do
    redis.call('ZREM', index, unpack(some))
  end
  redis.call('HDEL', entries, unpack(some))
  add('used', -freed)
  removed = removed + #some
  return #some
end
for _, index in ipairs({expiries, uses}) do
  -- However late it is, a call at least begins its work.
  while removed < count and (removed == 0 or not is_over()) do
    local members = redis.call('ZRANGE', index, '0', whole(math.min(count - removed, 32) - 1))
    if #members == 0 then
      break
    end
    remove_some(members)
  end
end
-- Entries that nothing else names are walked through: buckets in front of the cursor are empty.
if removed == 0 and count > 0 and redis.call('HLEN', entries) > 0 then
  local cursor = redis.call('HGET', state, 'dropped_at') or '0'
  repeat
    local found, members = redis.call('HSCAN', entries, cursor, 'COUNT', '32'), {}
    for i = 1, #found[2], 2 do
      members[#members + 1] = found[2][i]
    end
    if #members == 0 or remove_some(members) == #members then
      cursor = found[1]
    end
  until cursor == '0' or removed >= count or is_over()
  redis.call('HSET', state, 'dropped_at', cursor)
end
if values > 0 then
  redis.call('HINCRBY', state, 'dropped', whole(values))
  redis.call('HINCRBY', state, 'dropped_bytes', whole(bytes))
end

local used, held, dropped, dropped_bytes, from = fields('used', 'held', 'dropped', 'dropped_bytes', 'dropped_from')
local left = redis.call('HLEN', reservations) + math.max(redis.call('HLEN', entries), redis.call('ZCARD', expiries),
  redis.call('ZCARD', uses))
if left == 0 then
  redis.call('HDEL', state, 'used', 'held', 'lease', 'retention', 'cap', 'cap_since', 'cap_until', 'dropped_at',
    'rc_at', 'rc_sum', 'rc_used')
  if keep_ms > 0 then
    redis.call('PEXPIREAT', state, whole(now + keep_ms))
  else
    redis.call('PERSIST', state)
  end
end
return {removed, left, whole(used + held), whole(dropped), whole(dropped_bytes), whole(now - from)}
