-- Ends a writer's own reservation. Answers 1 if it existed.
local record = redis.call('HGET', reservations, member)
if not record or string.match(record, '^%d+:%d+:([^:]*)') ~= token then
  return 0
end
add('held', -release(member, record))
return 1
