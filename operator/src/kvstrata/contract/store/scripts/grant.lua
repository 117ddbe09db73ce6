-- Sets a ledger's grant from the tier, unless the ledger knows of a later change. Answers `ok` or `void`, bytes leased out.
if not live then
  return {'void', '0'}
end
if sequence > tonumber(redis.call('HGET', ledger, 'turn') or 0) then
  free_first()
  redis.call('HSET', ledger, 'room', whole(granted), 'turn', whole(sequence))
end
return {'ok', whole(leased)}
