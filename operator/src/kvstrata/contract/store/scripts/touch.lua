local there = 0
for i = 1, #ARGV do
  there = there + use(ARGV[i])
end
return there
