local operation, keyspace = ARGV[1], ARGV[2]
local guaranteed, wanted, capacity, turn = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local keep = tonumber(ARGV[7])
-- What the caller read in the scope's ledger, none of which a change of its own has to tell.
local leased, given, told = tonumber(ARGV[8] or 0), tonumber(ARGV[9] or 0), tonumber(ARGV[10] or 0)
-- How long ago the scope was in a policy.
local age = tonumber(ARGV[11] or 0)

local promised, room, last, _, seen = read(redis.call('HGET', rooms, keyspace))
-- What was found to be in no policy may be used again by now.
if operation == 'leave' and turn > 0 and turn ~= last then
  return {whole(room), '0', whole(sum - capacity)}
end
local charged = math.max(promised, room)
local others = sum - charged

-- This hash may have been lost, or have fallen back to an older copy, while ledgers live on other servers. Then a ledger
-- knows of a later turn, or, rebuilt since, of none, and what it has is charged before anything else is decided.
if told > last then
  room, last = math.max(room, given, leased), told
elseif told == 0 then
  room = math.max(room, leased)
end

-- Whoever changes a room takes a turn first; what was decided in an earlier one comes too late.
if operation == 'set' then
  if turn ~= last then
    return {whole(room), whole(last), whole(sum - capacity)}
  end
  room = wanted
else
  last = last + 1
  if operation == 'grow' then
    room = math.max(room, guaranteed, math.min(wanted, capacity - others))
  end
end

local charge = math.max(guaranteed, room)
-- Also on a full server, where giving room back is what frees memory: first a write that takes none.
redis.call('HDEL', rooms, '-')
if age > 0 and operation == 'set' and charge == 0 then
  redis.call('HDEL', rooms, keyspace)
else
  write(keyspace, guaranteed, room, last, now - age)
end
redis.call('HSET', rooms, 'sum', whole(others + charge))
if counted then
  redis.call('HSET', rooms, 'counted', whole(counted + charge - (seen == walk and charged or 0)))
end
if redis.call('PTTL', rooms) < keep then
  redis.call('PEXPIREAT', rooms, whole(now + 2 * keep))
end
return {whole(room), whole(last), whole(others + charge - capacity)}
