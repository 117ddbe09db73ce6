-- One step through an index, in its order, for names of which there is no block.
local index = base .. '#' .. ARGV[1]
local first, count = tonumber(ARGV[2]), tonumber(ARGV[3])
local named = ARGV[1] == 'x' and redis.call('ZCARD', expiries) or redis.call('ZCARD', uses)
if named == redis.call('HLEN', entries) then
  return {-1, 0}
end
free_first()
local found, removed = redis.call('ZRANGE', index, whole(first), whole(first + count - 1)), 0
for _, member in ipairs(found) do
  if redis.call('HEXISTS', entries, member) == 0 then
    remove(member)
    removed = removed + 1
  end
end
return {#found == count and first + count - removed or -1, removed}
