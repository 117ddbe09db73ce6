-- One step through a bucket's entries: removes those without their value, and values in plain where the tier encrypts.
-- Answers the next cursor, entries without their value, their bytes, values in plain.
local found = redis.call('HSCAN', entries, cursor, 'COUNT', whole(count))
local lost, lost_bytes, plain, plain_bytes = 0, 0, 0, 0
for i = 1, #found[2], 2 do
  local member, record = found[2][i], found[2][i + 1]
  local expiry = redis.call('ZSCORE', expiries, member)
  -- One that expired just now is no loss; the sweep removes it.
  if not expiry or tonumber(expiry) > now then
    local size = redis.call('STRLEN', base .. member)
    local ordered = redis.call('ZSCORE', uses, member)
    if not expiry or size ~= size_of(record) or not ordered then
      lost_bytes = lost_bytes + remove(member)
      lost = lost + 1
    elseif encrypts and not encrypted(member) then
      -- Left by a tier on the same server that was deleted.
      plain_bytes = plain_bytes + remove(member)
      plain = plain + 1
    end
  end
end
add('used', -lost_bytes - plain_bytes)
return {found[1], lost, lost_bytes, plain}
