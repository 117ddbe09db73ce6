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
for _, index in ipairs({expiries, once, often}) do
  for _, member in ipairs(removed < count and redis.call('ZRANGE', index, '0', whole(count - removed - 1)) or {}) do
    weigh(member)
    add('used', -remove(member))
    removed = removed + 1
  end
end
if removed == 0 and count > 0 then
  local found = redis.call('HSCAN', entries, '0', 'COUNT', whole(count))
  for i = 1, #found[2], 2 do
    weigh(found[2][i])
    add('used', -remove(found[2][i]))
    removed = removed + 1
  end
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
