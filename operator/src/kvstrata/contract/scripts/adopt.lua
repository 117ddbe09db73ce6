local lease, version = fields('lease', 'version')
if version > tonumber(ARGV[1]) then
  return {'newer', whole(version)}
end
if version < tonumber(ARGV[1]) then
  redis.call('HSET', state, 'version', ARGV[1])
end
return {'ok', whole(lease)}
