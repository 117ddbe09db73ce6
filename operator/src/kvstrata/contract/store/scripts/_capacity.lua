-- Common part of the scripts of a tier's capacity. KEYS[1] is `#t`: for each keyspace
-- `<guaranteed>:<granted>:<sequence>:<moment>:<walk>`, granted being the bytes that its ledger may lease out. A scope is charged
-- the larger of its guarantee and its grant; `sum` is the total of all charges. From time to time a walk over all of them
-- adds it up again: `walk` is its number, `counted` its sum so far, while one is under way, and each entry names the walk
-- that counted it.
local tier = KEYS[1]
local totals = redis.call('HMGET', tier, 'sum', 'walk', 'counted')
local sum, walk, counted = tonumber(totals[1] or 0), tonumber(totals[2] or 0), tonumber(totals[3] or '')

local function is_scope(field)
  return #field == 32 and string.match(field, '^%x+$')
end

local function read(text)
  local guaranteed, granted, sequence, moment, seen = string.match(text or '', '^(%d+):(%d+):(%d+):(%d+):?(%d*)$')
  return {
    guaranteed = tonumber(guaranteed or 0), granted = tonumber(granted or 0), sequence = tonumber(sequence or 0),
    moment = tonumber(moment or 0), walk = tonumber(seen or ''),
  }
end

local function write(keyspace, entry)
  redis.call('HSET', tier, keyspace, string.format('%.0f:%.0f:%.0f:%.0f:%.0f', entry.guaranteed, entry.granted,
    entry.sequence, entry.moment, walk))
end

local function charge(entry)
  return math.max(entry.guaranteed, entry.granted)
end

-- Reads a scope's entry and takes its charge out of the sums.
local function take(keyspace)
  local entry = read(redis.call('HGET', tier, keyspace))
  sum = sum - charge(entry)
  if counted and entry.walk == walk then
    counted = counted - charge(entry)
  end
  return entry
end

-- A change takes the next number, which voids decisions of before. The hash may have been lost, or have fallen back to
-- an older copy, while ledgers live on other servers. Then a ledger knows of a later number or, rebuilt since, of none,
-- and its bytes are charged before anything else is decided.
local function begin(entry, leased, ledger_granted, ledger_sequence)
  if ledger_sequence > entry.sequence then
    entry.granted, entry.sequence = math.max(entry.granted, ledger_granted, leased), ledger_sequence
  elseif ledger_sequence == 0 then
    entry.granted = math.max(entry.granted, leased)
  end
  entry.sequence = entry.sequence + 1
end

-- Returns bytes granted, number of the last change, and the bytes charged beyond the capacity (negative: free).
local function answer(entry, capacity)
  return {whole(entry.granted), whole(entry.sequence), whole(sum + charge(entry) - capacity)}
end

-- Stores an entry that was taken, of a scope that was in a policy `age_ms` ago, and adds its charge to the sums.
local function store(keyspace, entry, capacity, keep_ms, age_ms)
  free_first()
  entry.moment = now - age_ms
  write(keyspace, entry)
  redis.call('HSET', tier, 'sum', whole(sum + charge(entry)))
  if counted then
    redis.call('HSET', tier, 'counted', whole(counted + charge(entry)))
  end
  if redis.call('PTTL', tier) < keep_ms then
    redis.call('PEXPIREAT', tier, whole(now + 2 * keep_ms))
  end
  return answer(entry, capacity)
end
