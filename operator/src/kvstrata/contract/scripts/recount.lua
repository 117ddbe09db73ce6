-- A bucket of few entries is added up in one call, a large one in steps in the order of expiry. `rc_at` is the expiry
-- up to which entries were added up, `rc_sum` their bytes, which follow what changes meanwhile, and `rc_used` what
-- `used` has to be if everybody followed: a version that knows nothing of recounts does not.
local at_once, step = tonumber(ARGV[1]), tonumber(ARGV[2])
local total = redis.call('HLEN', entries)
local used, held = fields('used', 'held')
free_first()

local really_held, strays = 0, 0
for _, record in ipairs(redis.call('HVALS', reservations)) do
  really_held = really_held + size_of(record)
end
if really_held ~= held then
  redis.call('HSET', state, 'held', whole(really_held))
end

local function finish(sum)
  redis.call('HDEL', state, 'rc_at', 'rc_sum', 'rc_used')
  if sum ~= used then
    redis.call('HSET', state, 'used', whole(sum))
  end
  return {'ok', sum - used, really_held - held, strays}
end

if total <= at_once then
  local ones, others = redis.call('ZCARD', once), redis.call('ZCARD', often)
  local matches = redis.call('ZCARD', expiries) == total and ones + others == total
  for _, index in ipairs({expiries, once, often}) do
    if not matches then
      for _, member in ipairs(redis.call('ZRANGE', index, '0', '-1')) do
        if redis.call('HEXISTS', entries, member) == 0 then
          remove(member)
          strays = strays + 1
        end
      end
    end
  end
  local sum = 0
  for _, record in ipairs(redis.call('HVALS', entries)) do
    sum = sum + size_of(record)
  end
  return finish(sum)
end

local at = counted_until()
if not at then
  at = 0
  redis.call('HSET', state, 'rc_sum', '0', 'rc_used', whole(used))
end
local behind = '(' .. whole(at)
local found = redis.call('ZRANGE', expiries, behind, '+inf', 'BYSCORE', 'LIMIT', '0', whole(step), 'WITHSCORES')
local members, last = {}, #found > 0 and found[#found]
for i = 1, #found, 2 do
  if found[i + 1] ~= last then
    members[#members + 1] = found[i]
  end
end
for _, member in ipairs(last and redis.call('ZRANGE', expiries, last, last, 'BYSCORE') or {}) do
  members[#members + 1] = member
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
if tonumber(redis.call('HGET', state, 'rc_used')) ~= used then
  redis.call('HDEL', state, 'rc_at', 'rc_sum', 'rc_used')
  return {'again', 0, really_held - held, strays}
end
return finish(sum)
