-- Lowers a grant that the ledger knows to be lowered, if `sequence` is still the scope's last change. Answers as
-- `answer`. A scope in no policy that is charged nothing is forgotten.
local entry = take(keyspace)
if sequence ~= entry.sequence then
  return answer(entry, capacity)
end
entry.guaranteed, entry.granted = guaranteed, granted
local stored = store(keyspace, entry, capacity, keep_ms, age_ms)
if age_ms > 0 and charge(entry) == 0 then
  redis.call('HDEL', tier, keyspace)
end
return stored
