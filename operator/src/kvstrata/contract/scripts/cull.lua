-- One step through a bucket's entries: takes out what was computed under `former` identities. A count of 0 takes none.
local cursor, count, former = ARGV[1], tonumber(ARGV[2]), {}
for i = 3, #ARGV do
  former[ARGV[i]] = true
end
local freed, removed = 0, 0
if count > 0 then
  -- More would keep the server for too long.
  local found = redis.call('HSCAN', entries, cursor, 'COUNT', whole(math.min(count, 256)))
  cursor = found[1]
  for i = 1, #found[2], 2 do
    local member = found[2][i]
    if former[string.match(member, '^(%x+):') or ''] then
      freed = freed + remove(member)
      removed = removed + 1
    end
  end
  add('used', -freed)
end
return {cursor, removed, whole(freed), redis.call('HLEN', entries), whole(fields('used'))}
