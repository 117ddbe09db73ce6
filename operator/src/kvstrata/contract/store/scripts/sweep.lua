-- Removes expired blocks and dead reservations. Answers how many of each, 1 if more expired, and the next cursor.
local dead, _, following = reap(cursor)
local expired = expire(count)
return {expired, dead, expired == count and 1 or 0, following}
