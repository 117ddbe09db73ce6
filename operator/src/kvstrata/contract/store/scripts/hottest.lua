-- Answers the time, and of `count` blocks from the `first` on, in the order of use, the last first: name, last use, and
-- when it was computed.
local answer = {whole(now)}
local found = redis.call('ZRANGE', uses, whole(first), whole(first + count - 1), 'REV', 'WITHSCORES')
for i = 1, #found, 2 do
  local entry = redis.call('HGET', entries, found[i])
  if entry then
    answer[#answer + 1], answer[#answer + 2] = found[i], found[i + 1]
    answer[#answer + 1] = string.match(entry, '^%d+:(%d+)') or '0'
  end
end
return answer
