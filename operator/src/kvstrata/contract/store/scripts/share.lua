if not live then
  return {'void', whole(version)}
end
local turn = tonumber(redis.call('HGET', ledger, 'turn') or 0)
if tonumber(ARGV[2]) > turn then
  free_first()
  redis.call('HSET', ledger, 'room', ARGV[1], 'turn', ARGV[2])
end
return {'ok', whole(leased)}
