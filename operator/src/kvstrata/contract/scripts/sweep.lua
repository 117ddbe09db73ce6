local count = tonumber(ARGV[1])
local dead = reap()
local expired = expire(count)
return {expired, dead, expired == count and 1 or 0}
