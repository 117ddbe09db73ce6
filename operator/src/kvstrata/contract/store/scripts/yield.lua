-- Lowers a lease by up to `bytes`, evicting blocks if needed. Answers bytes yielded, the version of the lease, bytes
-- evicted, blocks evicted, and their ages.
local used, held, lease, version = fields('used', 'held', 'lease', 'version')
local taken = math.min(bytes, lease)
local evicted, number, ages = 0, 0, ''

local excess = used + held + taken - lease
if excess > 0 then
  local _, dead = reap()
  local _, late = expire(64)
  excess = excess - dead - late
end
if excess > 0 then
  evicted, number, ages = evict(excess, evict_before_ms, count)
  excess = excess - evicted
end
taken = math.max(0, taken - math.max(0, excess))
if taken > 0 then
  free_first()
  add('lease', -taken)
end
return {whole(taken), whole(version), whole(evicted), number, ages}
