-- Records a scope's guarantee and its ledger's grant. Answers as `answer`.
local entry = take(keyspace)
begin(entry, leased, ledger_granted, ledger_sequence)
entry.guaranteed = guaranteed
return store(keyspace, entry, capacity, keep_ms, 0)
