-- KEYS[1] is the claim. Answers 1 if it has this token now. A claim that ends later than it could have been given is
-- from before the server's clock was set back.
redis.call('HDEL', KEYS[1] .. '-', '-')  -- as `free_first`, for a key that is no hash
if redis.call('PTTL', KEYS[1]) > life_ms then
  redis.call('UNLINK', KEYS[1])
end
return redis.call('SET', KEYS[1], token, 'NX', 'PX', whole(life_ms)) and 1 or 0
