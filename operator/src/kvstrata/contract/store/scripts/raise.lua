local version, tombstone = fields('version', 'tombstone')
if version ~= tonumber(ARGV[2]) or tombstone ~= 0 then
  return 'void'
end
free_first()
redis.call('HINCRBY', state, 'lease', ARGV[1])
return 'ok'
