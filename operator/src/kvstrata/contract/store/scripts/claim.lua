-- KEYS[1] is the claim. One that ends later than it could have been given is from before the server's clock was set
-- back. A script may take memory on a full server once it has written something that takes none.
redis.call('HDEL', KEYS[1] .. '-', '-')
if redis.call('PTTL', KEYS[1]) > tonumber(ARGV[2]) then
  redis.call('UNLINK', KEYS[1])
end
return redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) and 1 or 0
