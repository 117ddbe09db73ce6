-- More would keep the server for too long. 0 leaves a tombstone and removes what nobody can read yet.
local count, keep = math.min(tonumber(ARGV[1]), 256), tonumber(ARGV[2])
free_first()
redis.call('HSET', state, 'tombstone', '1')
if redis.call('HEXISTS', state, 'dropped_from') == 0 then
  redis.call('HSET', state, 'dropped_from', whole(now))
end
redis.call('UNLINK', gone_once, gone_often)

-- What was deleted is told by the tombstone: whoever goes on after another was killed reports the same.
local removed, values, bytes = 0, 0, 0
local function weigh(member)
  local size = redis.call('STRLEN', base .. member)
  if size > 0 then
    values, bytes = values + 1, bytes + size
  end
end

local all = redis.call('HSCAN', reservations, '0', 'COUNT', '256')[2]
for i = 1, #all, 2 do
  -- What is committed goes with its index.
  if not redis.call('ZSCORE', expiries, all[i]) then
    weigh(all[i])
  end
  add('held', -release(all[i], all[i + 1]))
end
-- All in few calls: each of them costs, and the server serves nobody meanwhile.
local function remove_all(members)
  if #members == 0 then
    return
  end
  local names = {}
  for i, member in ipairs(members) do
    weigh(member)
    names[i] = base .. member
    if counted_until() then
      local entry = redis.call('HGET', entries, member)
      recount(redis.call('ZSCORE', expiries, member), entry and -size_of(entry) or 0)
    end
  end
  local freed = 0
  for _, entry in ipairs(redis.call('HMGET', entries, unpack(members))) do
    freed = freed + (entry and size_of(entry) or 0)
  end
  redis.call('UNLINK', unpack(names))
  for _, index in ipairs({expiries, once, often}) do
    redis.call('ZREM', index, unpack(members))
  end
  redis.call('HDEL', entries, unpack(members))
  add('used', -freed)
  removed = removed + #members
end
for _, index in ipairs({expiries, once, often}) do
  remove_all(removed < count and redis.call('ZRANGE', index, '0', whole(count - removed - 1)) or {})
end
if removed == 0 and count > 0 then
  local found, members = redis.call('HSCAN', entries, '0', 'COUNT', whole(count))[2], {}
  -- One step of a scan may give more than was asked for, and a call takes fewer than 8,000 arguments.
  for i = 1, math.min(#found, 4096), 2 do
    members[#members + 1] = found[i]
  end
  remove_all(members)
end
if values > 0 then
  redis.call('HINCRBY', state, 'dropped', whole(values))
  redis.call('HINCRBY', state, 'dropped_bytes', whole(bytes))
end

local used, held, dropped, dropped_bytes, from = fields('used', 'held', 'dropped', 'dropped_bytes', 'dropped_from')
local left = redis.call('HLEN', reservations) + math.max(redis.call('HLEN', entries), redis.call('ZCARD', expiries),
  redis.call('ZCARD', once) + redis.call('ZCARD', often))
if left == 0 then
  redis.call('HDEL', state, 'used', 'held', 'lease', 'retention', 'cap', 'cap_since', 'cap_until', 'p',
    'rc_at', 'rc_sum', 'rc_used')
  if keep > 0 then
    redis.call('PEXPIREAT', state, whole(now + keep))
  else
    redis.call('PERSIST', state)
  end
end
return {removed, left, whole(used + held), whole(dropped), whole(dropped_bytes), whole(now - from)}
