-- Adds up `step` entries of a bucket, in the order of expiry. `rc_at` is the expiry up to which entries were added up,
-- `rc_sum` their bytes, which later changes correct, and `rc_used` is `used` if every change since was counted: a version
-- that knows nothing of recounts does not. Answers `ok`, `more` or `again`, drift of used, drift of held, and strays.
local used, held = fields('used', 'held')
free_first()

local really_held, strays = 0, 0
local few = redis.call('HLEN', reservations) <= 1000
for _, record in ipairs(few and redis.call('HVALS', reservations) or {}) do
  really_held = really_held + size_of(record)
end
really_held = few and really_held or held
if really_held ~= held then
  redis.call('HSET', state, 'held', whole(really_held))
end

local at = counted_until()
if not at then
  at = 0
  redis.call('HSET', state, 'rc_sum', '0', 'rc_used', whole(used))
end
local behind = '(' .. string.format('%.10f', at)
local found = redis.call('ZRANGE', expiries, behind, '+inf', 'BYSCORE', 'LIMIT', '0', whole(step), 'WITHSCORES')
local members, last = {}, #found > 0 and found[#found]
for i = 1, #found, 2 do
  members[#members + 1] = found[i]
end
if #found == 2 * step then
  if found[2] ~= last then
    -- Those that expire together are counted together: with the next step, when all of them are seen.
    while found[2 * #members] == last do
      members[#members] = nil
    end
    last = found[2 * #members]
  else
    -- More than a step expires at one moment: this step's a fraction of a millisecond earlier from now on.
    local first = tonumber(last)
    local earlier = string.format('%.10f', math.max(at, first - 1) + 1 / 1024)
    if tonumber(earlier) < first then
      last = earlier
      for _, member in ipairs(members) do
        redis.call('ZADD', expiries, 'XX', last, member)
      end
    end
  end
end
local sum = 0
for _, member in ipairs(members) do
  local record = redis.call('HGET', entries, member)
  if record then
    sum = sum + size_of(record)
  else
    remove(member)
    strays = strays + 1
  end
end
sum = redis.call('HINCRBY', state, 'rc_sum', whole(sum))
if #found == 2 * step then
  redis.call('HSET', state, 'rc_at', last)
  return {'more', 0, really_held - held, strays}
end
local was_followed = tonumber(redis.call('HGET', state, 'rc_used')) == used
redis.call('HDEL', state, 'rc_at', 'rc_sum', 'rc_used')
if not was_followed then
  return {'again', 0, really_held - held, strays}
end
if sum ~= used then
  redis.call('HSET', state, 'used', whole(sum))
end
return {'ok', sum - used, really_held - held, strays}
