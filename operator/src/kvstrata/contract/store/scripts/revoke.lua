-- KEYS[1] is the domain's `#k`; its `#v` lies beside it.
local clock = redis.call('TIME')
local highest = string.sub(KEYS[1], 1, -2) .. 'v'
-- Also on a full server: a script may take memory once it has written something that takes none.
redis.call('HDEL', KEYS[1] .. '-', '-')
local revision = math.max(tonumber(ARGV[1]), tonumber(redis.call('GET', highest) or 0))
redis.call('SET', highest, string.format('%.0f', revision))
for i = 2, #ARGV do
  redis.call('ZADD', KEYS[1], 'NX', clock[1] * 1000, ARGV[i])
end
return revision
