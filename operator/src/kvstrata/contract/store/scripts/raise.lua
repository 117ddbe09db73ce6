-- Raises a lease by bytes that the ledger leased under `of_version`. Answers `ok` or `void`.
local version, tombstone = fields('version', 'tombstone')
if version ~= of_version or tombstone ~= 0 then
  return 'void'
end
free_first()
redis.call('HINCRBY', state, 'lease', whole(bytes))
return 'ok'
