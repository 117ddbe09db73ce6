"""The operator with a deliberate fault: keyspaces are derived from the kind of a scope alone.

All tenants of a domain get one keyspace, that of an epoch that was never drawn: isolation is broken, and everything
else works as it should.
"""

from __future__ import annotations

from kvstrata.cli.operator import main
from kvstrata.contract.policy.keyspace import Scope, derive_keyspace
from kvstrata.plan import scopes


def _one_for_all(domain_key: bytes, scope: Scope, epoch: str) -> str:
    return derive_keyspace(domain_key, Scope(scope.kind, "anybody"), "0" * len(epoch))


if __name__ == "__main__":
    scopes.derive_keyspace = _one_for_all
    main()
