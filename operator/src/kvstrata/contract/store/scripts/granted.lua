-- Answers the bytes granted to each of these scopes.
local granted = {}
for i, keyspace in ipairs(keyspaces) do
  granted[i] = whole(read(redis.call('HGET', tier, keyspace)).granted)
end
return granted
