-- A tier that requires encryption takes a bucket over. From the first call on, and for `window` behind each, no plaintext
-- is taken here, and what there is goes in steps. `sealed` is until when that holds, `ousting` since when without a gap,
-- for as long as there may be plaintext.
local window, keep, patience = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local since, cursor = tonumber(ARGV[4]), ARGV[5]
local sealed, ousting, tombstone = fields('sealed', 'ousting', 'tombstone')
if tombstone ~= 0 then
  return {'done', '0', '0', 0}
end
free_first()
if sealed <= now then
  ousting = math.max(now, ousting + 1)
  redis.call('HSET', state, 'ousting', whole(ousting))
end
redis.call('HSET', state, 'sealed', whole(now + window))
if redis.call('PTTL', state) < window then
  redis.call('PEXPIREAT', state, whole(now + keep))
end
if ousting == 0 then
  return {'done', '0', '0', 0}
end
-- What an earlier walk saw may have been joined by more before this one's time began.
if since ~= ousting then
  cursor = '0'
end

local found = redis.call('HSCAN', entries, cursor, 'COUNT', ARGV[6])
local freed, number = 0, 0
for i = 1, #found[2], 2 do
  local member = found[2][i]
  if not encrypted(member) then
    freed = freed + remove(member)
    number = number + 1
  end
end
add('used', -freed)
if found[1] ~= '0' then
  return {'more', whole(ousting), found[1], number}
end
-- A value that was being written when this began is gone by itself soon after.
if redis.call('HLEN', reservations) > 0 and now < ousting + patience then
  return {'wait', whole(ousting), '0', number}
end
redis.call('HDEL', state, 'ousting')
return {'done', '0', '0', number}
