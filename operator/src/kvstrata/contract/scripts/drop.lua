-- More would keep the server for too long.
local count, keep = math.min(tonumber(ARGV[1]), 256), tonumber(ARGV[2])
free_first()
redis.call('HSET', state, 'tombstone', '1')
redis.call('UNLINK', gone_once, gone_often)

local removed = 0
local all = redis.call('HSCAN', reservations, '0', 'COUNT', '256')[2]
for i = 1, #all, 2 do
  add('held', -release(all[i], all[i + 1]))
end
for _, index in ipairs({expiries, once, often}) do
  for _, member in ipairs(removed < count and redis.call('ZRANGE', index, '0', whole(count - removed - 1)) or {}) do
    add('used', -remove(member))
    removed = removed + 1
  end
end
if removed == 0 then
  local found = redis.call('HSCAN', entries, '0', 'COUNT', whole(count))
  for i = 1, #found[2], 2 do
    add('used', -remove(found[2][i]))
    removed = removed + 1
  end
end

local left = redis.call('HLEN', entries) + redis.call('HLEN', reservations) + redis.call('ZCARD', expiries)
  + redis.call('ZCARD', once) + redis.call('ZCARD', often)
if left == 0 then
  redis.call('HDEL', state, 'used', 'held', 'lease', 'retention', 'cap', 'cap_since', 'cap_until', 'p',
    'rc_at', 'rc_sum', 'rc_used')
  if keep > 0 then
    redis.call('PEXPIREAT', state, whole(now + keep))
  else
    redis.call('PERSIST', state)
  end
end
return {removed, left}
