-- One step of a shortening of all lives in a bucket. Answers `done`, `more` or `again`, the next cursor, and since when.
local longest, cap, cap_since, cap_until = fields('retention', 'cap', 'cap_since', 'cap_until')
if longest <= life_ms then
  return {'done', '0', '0'}
end
free_first()

-- Until the last entry is seen, nothing may be committed under the longer retention.
if cap == 0 or cap > life_ms or cap_until <= now then
  cap, cap_since = life_ms, now
  redis.call('HSET', state, 'cap', whole(cap), 'cap_since', whole(cap_since))
end
redis.call('HSET', state, 'cap_until', whole(now + 60000))
if since == 0 then
  since = now
end

local found = redis.call('HSCAN', entries, cursor, 'COUNT', whole(count))
local freed = 0
for i = 1, #found[2], 2 do
  local member = found[2][i]
  local latest = tonumber(string.match(found[2][i + 1], '^%d+:(%d+)$')) + life_ms
  if latest <= now then
    freed = freed + remove(member)
  else
    local expiry = redis.call('ZSCORE', expiries, member)
    if expiry and tonumber(expiry) > latest then
      redis.call('ZADD', expiries, 'XX', whole(latest), member)
      if counted_until() and tonumber(expiry) > counted_until() then
        recount(latest, size_of(found[2][i + 1]))
      end
      redis.call('PEXPIREAT', base .. member, whole(latest))
    end
  end
end
add('used', -freed)

if found[1] ~= '0' then
  return {'more', found[1], whole(since)}
end
if cap_since > since then
  -- The cap lapsed or was lowered again in the middle: entries may have slipped in behind the cursor.
  return {'again', '0', '0'}
end
redis.call('HSET', state, 'retention', whole(life_ms))
if cap >= life_ms then
  redis.call('HDEL', state, 'cap', 'cap_since', 'cap_until')
end
return {'done', '0', '0'}
