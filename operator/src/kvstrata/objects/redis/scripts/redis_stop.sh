# Before a server of a managed Redis Cluster stops: a primary has its replica that is furthest take over, and waits.
#
#     sh -c "<this>" redis-stop PATIENCE_S AUTH HOST PORT [option of the client ...]
#
# AUTH has the password of the user admin. In case of any error the server stops; the others then promote by themselves.
set -u
patience_s=$1 auth=$2 host=$3 port=$4
shift 4

for client in redis-cli valkey-cli; do
    command -v "$client" >/dev/null && break
done
REDISCLI_AUTH=$(cat "$auth/admin-password") || exit 0
export REDISCLI_AUTH

replication() {
    "$client" --user admin -h "$host" -p "$port" "$@" info replication | tr -d '\r'
}

# A line is: slave0:ip=10.0.0.7,port=6379,state=online,offset=1234,lag=0
heir=$(
    replication "$@" |
        sed -n 's/^slave[0-9]*:ip=\([^,]*\),port=\([0-9]*\),state=online,offset=\([0-9]*\),.*/\3 \1 \2/p' |
        sort -rn | head -n 1
)
heir=${heir#* }
[ -n "$heir" ] || exit 0
"$client" --user admin -h "${heir% *}" -p "${heir#* }" "$@" cluster failover

tenths=$((patience_s * 10))
while [ "$tenths" -gt 0 ]; do
    case $(replication "$@") in *role:slave*) exit 0 ;; esac
    sleep 0.1
    tenths=$((tenths - 1))
done
