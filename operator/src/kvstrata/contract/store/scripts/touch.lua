-- Records uses of blocks. Answers how many exist.
local there = 0
for _, member in ipairs(members) do
  there = there + use(member)
end
return there
