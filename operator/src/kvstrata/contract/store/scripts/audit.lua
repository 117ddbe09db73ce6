local found = redis.call('HSCAN', entries, ARGV[1], 'COUNT', ARGV[2])
local lost, freed = 0, 0
for i = 1, #found[2], 2 do
  local member, record = found[2][i], found[2][i + 1]
  forget(member)
  local expiry = redis.call('ZSCORE', expiries, member)
  -- One that expired just now is no loss; the sweep takes it out.
  if not expiry or tonumber(expiry) > now then
    local size = redis.call('STRLEN', base .. member)
    local ordered = redis.call('ZSCORE', once, member) or redis.call('ZSCORE', often, member)
    if not expiry or size ~= size_of(record) or not ordered then
      freed = freed + remove(member)
      lost = lost + 1
    end
  end
end
add('used', -freed)
return {found[1], lost, freed}
