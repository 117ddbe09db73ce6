local there = {}
for i = 1, #ARGV do
  local known = redis.call('HEXISTS', entries, ARGV[i])
  if known == 1 then
    add('used', -remove(ARGV[i]))
  end
  there[i] = known
end
return there
