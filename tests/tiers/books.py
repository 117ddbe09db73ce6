"""What a server holds of one scope, read at one instant from the outside: values, index, accounting, ledger."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix, ledger_key
from tests.tiers.gate_stand_in import DOMAIN
from tests.tiers.redis_process import RedisProcess

_TOTALS = """
local used, held, lease, charged, stored = 0, 0, 0, 0, 0
for i = 2, #KEYS do
  local base = string.sub(KEYS[i], 1, -3)
  local state = redis.call('HMGET', KEYS[i], 'used', 'held', 'lease')
  for _, entry in ipairs(redis.call('HVALS', base .. '#m')) do
    charged = charged + string.match(entry, '^%d+')
  end
  used, held, lease = used + (state[1] or 0), held + (state[2] or 0), lease + (state[3] or 0)
end
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  if not string.find(key, '#', 1, true) then
    stored = stored + redis.call('STRLEN', key)
  end
end
local leased = redis.call('HGET', KEYS[1], 'leased')
if redis.call('HEXISTS', KEYS[1], 'void') == 1 then
  leased = -1
end
return {used, held, lease, tonumber(leased or 0), charged, stored}
"""


@dataclass(frozen=True)
class Totals:
    """Sums over all buckets of a scope, in bytes.

    `charged` is what the index says of its blocks, `stored` are the lengths of all values, committed or not. `leased`
    is what the ledger says that buckets have, -1 while it is made anew from them and says nothing.
    """

    used: int
    held: int
    lease: int
    leased: int
    charged: int
    stored: int

    @property
    def granted(self) -> int:
        """What buckets have: by the ledger, or by themselves while it is made anew."""
        return self.lease if self.leased < 0 else self.leased

    def holds(self, limit: int) -> bool:
        """Whether nothing exceeds what it is bounded by."""
        return self.stored <= self.used + self.held <= self.lease <= self.granted <= limit


class Books:
    """One scope's books on a server."""

    def __init__(self, server: RedisProcess, keyspace: str) -> None:
        self._admin = server.admin()
        self._bases = [bucket_prefix(DOMAIN, keyspace, bucket) for bucket in range(BUCKETS)]
        self.ledger = ledger_key(DOMAIN, keyspace)
        self._pattern = f"kvs1:{DOMAIN}:{{{keyspace}:*"
        self._script = self._admin.register_script(_TOTALS)

    def totals(self) -> Totals:
        """Read all sums in one script."""
        keys = [self.ledger, *(f"{base}:#s" for base in self._bases)]
        return Totals(*self._script(keys=keys, args=[self._pattern]))

    def leases(self) -> list[int]:
        """The lease of each bucket."""
        return [int(self._admin.hget(f"{base}:#s", "lease") or 0) for base in self._bases]

    def charged(self) -> list[int]:
        """What the ledger charges for each bucket."""
        return [int(self._admin.hget(self.ledger, f"b:{bucket}") or 0) for bucket in range(BUCKETS)]

    def version(self) -> int:
        """The ledger's version, 0 without one."""
        return int(self._admin.hget(self.ledger, "v") or 0)

    def live(self) -> bool:
        """Whether the ledger gives leases now."""
        return self.version() > 0 and not self._admin.hexists(self.ledger, "void")

    def lose_ledger(self) -> None:
        """Delete the ledger."""
        self._admin.delete(self.ledger)

    def values(self) -> dict[str, int]:
        """All values and their lengths."""
        names = [name.decode() for name in self._admin.scan_iter(self._pattern, count=1000) if b"#" not in name]
        return {name: self._admin.strlen(name) for name in names}

    def entries(self) -> dict[str, int]:
        """What is committed according to the index, with the bytes that are charged for it."""
        return {
            f"{base}:{member.decode()}": int(entry.split(b":")[0])
            for base in self._bases
            for member, entry in self._admin.hgetall(f"{base}:#m").items()
        }

    def names(self, *indexes: str) -> list[str]:
        """The blocks that these sorted sets name, in their order, by bucket."""
        return [
            f"{base}:{member.decode()}"
            for base in self._bases
            for index in indexes
            for member in self._admin.zrange(f"{base}:{index}", 0, -1)
        ]

    def reservations(self) -> int:
        """How many reservations there are."""
        return sum(self._admin.hlen(f"{base}:#r") for base in self._bases)

    def assert_consistent(self) -> None:
        """Index, values and accounting say the same, and nobody is in the middle of a store."""
        values, entries = self.values(), self.entries()
        assert sorted(values) == sorted(entries)
        assert values == entries, "what is charged is what is stored"
        assert sorted(self.names("#x")) == sorted(entries)
        assert sorted(self.names("#a")) == sorted(entries), "each is in the order of use"
        totals = self.totals()
        assert totals.used == sum(values.values())
        assert totals.held == 0
        assert self.reservations() == 0
