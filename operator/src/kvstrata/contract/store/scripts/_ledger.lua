-- Common part of a ledger's scripts. KEYS[1] is `#l`. A ledger that lived under another replication id may
-- have lost its last leases, so it counts for nothing until it is rebuilt from the buckets.
local ledger = KEYS[1]
local replication = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or ''
local known = redis.call('HMGET', ledger, 'v', 'void', 'replid', 'leased', 'at')
local version, void, leased, at = tonumber(known[1] or 0), known[2], tonumber(known[4] or 0), tonumber(known[5] or 0)
local is_own = known[3] == replication
local live = known[1] and not void and is_own
