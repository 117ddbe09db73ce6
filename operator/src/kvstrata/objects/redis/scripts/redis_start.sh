# Starts a server of a managed Redis Cluster as a new and empty node.
#
#     sh -c "<this>" redis-start WAIT_S DATA AUTH [argument of the server ...]
#
# DATA is a folder that outlives the container and not the pod, AUTH has the password of the user replication. The
# password goes in by standard input, so that neither arguments nor environment nor a disk ever hold it.
set -eu
umask 077
wait_s=$1 data=$2 auth=$3
shift 3

if [ -e "$data/started" ]; then
    # Others still take this address for the server that was here before. Its replica would load an empty data set from
    # here, and others that find another name here forget the former one's address, and a server without one is never failed over: so they must first see it fail, and promote its replica.
    trap 'kill $!; exit 143' TERM INT
    sleep "$wait_s" &
    wait $!
    trap - TERM INT
fi
: >"$data/started"
rm -f "$data/nodes.conf"

for server in redis-server valkey-server; do
    if command -v "$server" >/dev/null; then
        password=$(cat "$auth/replication-password")
        exec "$server" "$@" - <<CONFIG
masteruser replication
masterauth "$password"
CONFIG
    fi
done
echo "this image has neither redis-server nor valkey-server" >&2
exit 127
