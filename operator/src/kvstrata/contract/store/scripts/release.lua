-- Ends the guarantee of a scope in no policy, if `sequence` is still its last change (0: in any case). Answers as
-- `answer`, with 0 for the change if it is not: the scope may be in use again.
local entry = take(keyspace)
if sequence > 0 and sequence ~= entry.sequence then
  return {whole(entry.granted), '0', '0'}
end
begin(entry, leased, ledger_granted, ledger_sequence)
entry.guaranteed = 0
return store(keyspace, entry, 0, keep_ms, age_ms)
