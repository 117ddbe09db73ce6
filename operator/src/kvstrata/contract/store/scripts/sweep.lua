local count, arc = tonumber(ARGV[1]), ARGV[2] == '1'
local dead, _, cursor = reap(ARGV[3])
local expired = expire(count)

-- The name of an evicted block is kept no longer than the block could have been.
local longest = fields('retention')
for _, names in ipairs({gone_once, gone_often}) do
  if not arc then
    redis.call('UNLINK', names)
  else
    local late = redis.call('ZRANGE', names, '-inf', whole(now - longest), 'BYSCORE', 'LIMIT', '0', '1000')
    if #late > 0 then
      redis.call('ZREM', names, unpack(late))
    end
  end
end
return {expired, dead, expired == count and 1 or 0, cursor}
