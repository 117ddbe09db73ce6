-- One step through all scopes for those in no policy: no sweep has renewed them for `stale_ms`. Answers the next cursor,
-- and of each: keyspace, bytes charged, number of the last change, and milliseconds since then.
local found = redis.call('HSCAN', tier, cursor, 'COUNT', whole(count))
local answer = {found[1]}
for i = 1, #found[2], 2 do
  local keyspace, entry = found[2][i], read(found[2][i + 1])
  if is_scope(keyspace) and now - entry.moment >= stale_ms then
    answer[#answer + 1], answer[#answer + 2] = keyspace, whole(charge(entry))
    answer[#answer + 1], answer[#answer + 2] = whole(entry.sequence), whole(now - entry.moment)
  end
end
return answer
