-- KEYS[1] is the domain's `#k`; its `#v` lies beside it. Answers the highest revision that revoked a keyspace.
local highest = string.sub(KEYS[1], 1, -2) .. 'v'
redis.call('HDEL', KEYS[1] .. '-', '-')  -- as `free_first`, for a key that is no hash
revision = math.max(revision, tonumber(redis.call('GET', highest) or 0))
redis.call('SET', highest, whole(revision))
for _, keyspace in ipairs(keyspaces) do
  redis.call('ZADD', KEYS[1], 'NX', clock[1] * 1000, keyspace)
end
return revision
