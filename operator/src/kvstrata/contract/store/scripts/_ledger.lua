-- What the scripts of a ledger have in common. A ledger that lived under another replication id may have lost its last
-- grants, so it counts for nothing until it is rebuilt from the buckets.
local ledger = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
-- What new versions begin at: in microseconds, no two ledgers that were lost begin at the same.
local beginning = clock[1] * 1000000 + clock[2]
local replication = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or ''

local function whole(number)
  return string.format('%.0f', number)
end

-- On a full server the first write of a script must be one that takes no memory; then all others are allowed.
local function free_first()
  redis.call('HDEL', ledger, '-')
end

local known = redis.call('HMGET', ledger, 'v', 'void', 'replid', 'leased', 'at')
local version, leased = tonumber(known[1] or 0), tonumber(known[4] or 0)
local live = known[1] and not known[2] and known[3] == replication
