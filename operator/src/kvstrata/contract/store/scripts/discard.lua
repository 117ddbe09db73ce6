-- Deletes blocks. Answers 1 for each that existed.
local there = {}
for i, member in ipairs(members) do
  local known = redis.call('HEXISTS', entries, member)
  if known == 1 then
    add('used', -remove(member))
  end
  there[i] = known
end
return there
