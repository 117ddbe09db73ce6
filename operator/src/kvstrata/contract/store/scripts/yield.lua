local wanted, evict_before, count = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local used, held, lease, version = fields('used', 'held', 'lease', 'version')
local taken = math.min(wanted, lease)
local evicted, number, ages = 0, 0, ''

local excess = used + held + taken - lease
if excess > 0 then
  local _, dead = reap()
  local _, late = expire(64)
  excess = excess - dead - late
end
if excess > 0 then
  evicted, number, ages = evict(excess, evict_before, count)
  excess = excess - evicted
end
taken = math.max(0, taken - math.max(0, excess))
if taken > 0 then
  free_first()
  add('lease', -taken)
end
return {whole(taken), whole(version), whole(evicted), number, ages}
