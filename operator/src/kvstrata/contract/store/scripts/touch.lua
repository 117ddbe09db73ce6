local arc, there = ARGV[1] == '1', 0
for i = 2, #ARGV do
  there = there + use(ARGV[i], arc)
end
return there
