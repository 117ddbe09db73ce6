-- Takes back the bytes that a bucket yielded under `of_version`. Answers `ok` or `void`.
local field = 'b:' .. bucket
if not live or version ~= of_version then
  return 'void'
end
local amount = math.min(bytes, tonumber(redis.call('HGET', ledger, field) or 0), leased)
if amount > 0 then
  free_first()
  redis.call('HINCRBY', ledger, field, whole(-amount))
  redis.call('HSET', ledger, 'leased', whole(leased - amount), 'at', whole(now))
end
return 'ok'
