-- One step through index `x` or `a`, in its order, for names without a block. Answers the next position or -1, and how
-- many it removed.
local named = index == 'x' and redis.call('ZCARD', expiries) or redis.call('ZCARD', uses)
if named == redis.call('HLEN', entries) then
  return {-1, 0}
end
free_first()
local found, removed = redis.call('ZRANGE', base .. '#' .. index, whole(first), whole(first + count - 1)), 0
for _, member in ipairs(found) do
  if redis.call('HEXISTS', entries, member) == 0 then
    remove(member)
    removed = removed + 1
  end
end
return {#found == count and first + count - removed or -1, removed}
