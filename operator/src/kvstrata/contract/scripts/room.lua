-- KEYS[1] is a tier's `#t`: for each keyspace `<guaranteed>:<room>:<turn>:<moment>`, room being what its ledger may
-- lease out. One that no sweep has renewed for a while is in no policy any more: nothing is guaranteed to it, and its room
-- is what its blocks take until they expire.
local stale = 900000
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local operation, keyspace = ARGV[1], ARGV[2]
local guaranteed, wanted, capacity, turn = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local keep = tonumber(ARGV[7])
-- What the caller read in the scope's ledger, none of which a change of its own has to tell.
local leased, given, told = tonumber(ARGV[8] or 0), tonumber(ARGV[9] or 0), tonumber(ARGV[10] or 0)

local room, last, total = 0, 0, 0
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local promised, lent, count, renewed = string.match(all[i + 1], '^(%d+):(%d+):(%d+):(%d+)$')
  if all[i] == keyspace then
    room, last = tonumber(lent), tonumber(count)
  elseif now - renewed < stale then
    total = total + math.max(tonumber(promised), tonumber(lent))
  elseif now - renewed < keep then
    total = total + lent
  else
    redis.call('HDEL', KEYS[1], all[i])
  end
end

-- This hash may have been lost, or have fallen back to an older copy, while ledgers live on other servers. Then a ledger
-- knows of a later turn, or, rebuilt since, of none, and what it has is charged before anything else is decided.
if told > last then
  room, last = math.max(room, given, leased), told
elseif told == 0 then
  room = math.max(room, leased)
end
total = total + math.max(guaranteed, room)

-- Whoever changes a room takes a turn first; what was decided in an earlier one comes too late.
if operation == 'set' then
  if turn ~= last then
    return {string.format('%.0f', room), string.format('%.0f', last), '0'}
  end
  room = wanted
else
  last = last + 1
  if operation == 'grow' then
    local others = total - math.max(guaranteed, room)
    room = math.max(room, guaranteed, math.min(wanted, capacity - others))
    total = others + room
  end
end
-- Also on a full server, where giving room back is what frees memory: first a write that takes none.
redis.call('HDEL', KEYS[1], '-')
redis.call('HSET', KEYS[1], keyspace, string.format('%.0f:%.0f:%.0f:%.0f', guaranteed, room, last, now))
return {string.format('%.0f', room), string.format('%.0f', last), string.format('%.0f', math.max(0, total - capacity))}
