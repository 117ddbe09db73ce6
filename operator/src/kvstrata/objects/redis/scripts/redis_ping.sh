# Whether a Redis server answers. One that asks for a password is alive, and guards its data.
#
#     sh -c "<this>" redis-ping PORT [option of the client ...]
port=$1
shift
for client in redis-cli valkey-cli; do
    command -v "$client" >/dev/null && break
done
"$client" -h 127.0.0.1 -p "$port" "$@" ping 2>&1 | grep -q -e PONG -e NOAUTH
