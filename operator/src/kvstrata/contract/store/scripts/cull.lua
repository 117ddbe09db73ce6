-- One step through a bucket's entries: removes blocks that were computed under former identities. One without a
-- fingerprint stands for all blocks of its declared identity. A count of 0 removes none. Answers the next cursor, blocks removed, their bytes, entries left,
-- bytes of all, and 1 if there was no time for all of this step: the rest is found from the same cursor again.
local former = {}
for _, identity in ipairs(identities) do
  former[identity] = true
end
local freed, removed, again = 0, 0, false
if count > 0 then
  local found = redis.call('HSCAN', entries, cursor, 'COUNT', whole(math.min(count, 256)))
  for i = 1, #found[2], 2 do
    local member = found[2][i]
    if former[string.match(member, '^%x+') or ''] or former[string.match(member, '^%x+%.%x+') or ''] then
      freed = freed + remove(member)
      removed = removed + 1
      again = is_over()
      if again then
        break
      end
    end
  end
  cursor = again and cursor or found[1]
  add('used', -freed)
end
return {cursor, removed, whole(freed), redis.call('HLEN', entries), whole(fields('used')), again and 1 or 0}
