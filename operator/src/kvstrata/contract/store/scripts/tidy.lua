-- One step of a walk over all scopes. One that no sweep has renewed for `stale_ms` is in no policy any more: nothing is
-- guaranteed to it, and it is charged its grant until its blocks have expired, after `keep_ms`. Answers the next cursor,
-- the walk, and by how much the sum differed.
free_first()
if mine == 0 then
  walk, counted, cursor = walk + 1, 0, '0'
  redis.call('HSET', tier, 'walk', whole(walk))
elseif not counted or mine ~= walk then
  return {'0', whole(mine), '0'}
end

local found = redis.call('HSCAN', tier, cursor, 'COUNT', whole(count))
for i = 1, #found[2], 2 do
  local keyspace, entry = found[2][i], read(found[2][i + 1])
  if is_scope(keyspace) and entry.walk ~= walk then
    sum = sum - charge(entry)
    -- One of the future is from before the server's clock was set back.
    entry.moment = math.min(entry.moment, now)
    if now - entry.moment >= keep_ms then
      redis.call('HDEL', tier, keyspace)
    else
      entry.guaranteed = now - entry.moment < stale_ms and entry.guaranteed or 0
      write(keyspace, entry)
      sum, counted = sum + charge(entry), counted + charge(entry)
    end
  end
end

if found[1] ~= '0' then
  redis.call('HSET', tier, 'sum', whole(sum), 'counted', whole(counted))
  return {found[1], whole(walk), '0'}
end
redis.call('HSET', tier, 'sum', whole(counted))
redis.call('HDEL', tier, 'counted')
return {'0', whole(walk), whole(counted - sum)}
