local member, token = ARGV[1], ARGV[2]
local record = redis.call('HGET', reservations, member)
if not record or string.match(record, '^%d+:%d+:([^:]*)') ~= token then
  return 0
end
add('held', -release(member, record))
return 1
