local total = redis.call('HLEN', entries)
if total > tonumber(ARGV[1]) then
  return {'skipped', 0, 0, 0}
end
free_first()

local strays = 0
for _, index in ipairs({expiries, accesses}) do
  if redis.call('ZCARD', index) ~= total then
    for _, member in ipairs(redis.call('ZRANGE', index, '0', '-1')) do
      if redis.call('HEXISTS', entries, member) == 0 then
        remove(member)
        strays = strays + 1
      end
    end
  end
end

local used, held = fields('used', 'held')
local really = {used = 0, held = 0}
for _, record in ipairs(redis.call('HVALS', entries)) do
  really.used = really.used + size_of(record)
end
for _, record in ipairs(redis.call('HVALS', reservations)) do
  really.held = really.held + size_of(record)
end
if really.used ~= used or really.held ~= held then
  redis.call('HSET', state, 'used', whole(really.used), 'held', whole(really.held))
end
return {'ok', really.used - used, really.held - held, strays}
