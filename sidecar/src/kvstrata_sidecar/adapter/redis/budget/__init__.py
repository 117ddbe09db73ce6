"""Budgets in the shared tier: leases, capacity of scopes, reclaim, expiry."""
