local lease, version = fields('lease', 'version')
if version >= tonumber(ARGV[1]) then
  return {'newer', whole(version)}
end
free_first()
redis.call('HSET', state, 'version', ARGV[1])
return {'ok', whole(lease)}
