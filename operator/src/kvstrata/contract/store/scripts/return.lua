local bucket = 'b:' .. ARGV[1]
if not live or version ~= tonumber(ARGV[3]) then
  return 'void'
end
local amount = math.min(tonumber(ARGV[2]), tonumber(redis.call('HGET', ledger, bucket) or 0), leased)
if amount <= 0 then
  return 'ok'
end
free_first()
redis.call('HINCRBY', ledger, bucket, whole(-amount))
redis.call('HSET', ledger, 'leased', whole(leased - amount), 'at', whole(now))
return 'ok'
