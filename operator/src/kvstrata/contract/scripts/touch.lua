local pairs_of = {}
for i = 1, #ARGV do
  pairs_of[2 * i - 1], pairs_of[2 * i] = whole(now), ARGV[i]
end
return redis.call('ZADD', accesses, 'XX', 'CH', unpack(pairs_of))
