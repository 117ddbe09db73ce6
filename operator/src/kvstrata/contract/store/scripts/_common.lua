-- Common part of all scripts. The server's clock is the only one; `now` is in milliseconds.
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- Lua would write large numbers with an exponent.
local function whole(number)
  return string.format('%.0f', number)
end

-- On a full server the first write of a script must be one that takes no memory; then all others are allowed.
local function free_first()
  redis.call('HDEL', KEYS[1], '-')
end

