-- One step of a walk over all scopes. One that no sweep has renewed for `stale` is in no policy any more: nothing is
-- guaranteed to it, and its room is what its blocks take until they expire, after `keep`.
local cursor, mine, stale, keep = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4]), tonumber(ARGV[5])
redis.call('HDEL', rooms, '-')
if mine == 0 then
  walk, counted, cursor = walk + 1, 0, '0'
  redis.call('HSET', rooms, 'walk', whole(walk))
elseif not counted or mine ~= walk then
  return {'0', whole(mine), '0'}
end

local found = redis.call('HSCAN', rooms, cursor, 'COUNT', ARGV[3])
for i = 1, #found[2], 2 do
  local keyspace = found[2][i]
  if string.match(keyspace, '^%x+$') and #keyspace == 32 then
    local promised, room, turn, moment, seen = read(found[2][i + 1])
    if seen ~= walk then
      -- One of the future is from before the server's clock was set back.
      moment = math.min(moment, now)
      local charged = math.max(promised, room)
      if now - moment >= keep then
        redis.call('HDEL', rooms, keyspace)
        sum = sum - charged
      else
        promised = now - moment < stale and promised or 0
        write(keyspace, promised, room, turn, moment)
        sum = sum - charged + math.max(promised, room)
        counted = counted + math.max(promised, room)
      end
    end
  end
end

if found[1] ~= '0' then
  redis.call('HSET', rooms, 'sum', whole(sum), 'counted', whole(counted))
  return {found[1], whole(walk), '0'}
end
redis.call('HSET', rooms, 'sum', whole(counted))
redis.call('HDEL', rooms, 'counted')
return {'0', whole(walk), whole(counted - sum)}
