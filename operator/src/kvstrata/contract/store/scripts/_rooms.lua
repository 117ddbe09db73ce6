-- What the scripts of a tier's division have in common. KEYS[1] is `#t`: for each keyspace
-- `<guaranteed>:<room>:<turn>:<moment>:<walk>`, room being what its ledger may lease out. A scope is charged the larger of
-- its guarantee and its room; `sum` is what all are charged. From time to time a walk over all of them adds it up anew:
-- `walk` is its number, `counted` its sum so far, while one is under way, and each entry names the walk that counted it.
local rooms = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function whole(number)
  return string.format('%.0f', number)
end

local function read(entry)
  local guaranteed, room, turn, moment, walk = string.match(entry or '', '^(%d+):(%d+):(%d+):(%d+):?(%d*)$')
  return tonumber(guaranteed or 0), tonumber(room or 0), tonumber(turn or 0), tonumber(moment or 0), tonumber(walk or '')
end

local totals = redis.call('HMGET', rooms, 'sum', 'walk', 'counted')
local sum, walk, counted = tonumber(totals[1] or 0), tonumber(totals[2] or 0), tonumber(totals[3] or '')

local function write(keyspace, guaranteed, room, turn, moment)
  local entry = string.format('%.0f:%.0f:%.0f:%.0f:%.0f', guaranteed, room, turn, moment, walk)
  redis.call('HSET', rooms, keyspace, entry)
end
