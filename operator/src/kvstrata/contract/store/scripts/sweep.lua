local count = tonumber(ARGV[1])
local dead, _, cursor = reap(ARGV[2])
local expired = expire(count)
return {expired, dead, expired == count and 1 or 0, cursor}
