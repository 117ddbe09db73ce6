-- Grants a scope `wanted` bytes as far as they are guaranteed or free. Answers as `answer`.
local entry = take(keyspace)
begin(entry, leased, ledger_granted, ledger_sequence)
entry.guaranteed = guaranteed
entry.granted = math.max(entry.granted, guaranteed, math.min(wanted, capacity - sum))
return store(keyspace, entry, capacity, keep_ms, 0)
