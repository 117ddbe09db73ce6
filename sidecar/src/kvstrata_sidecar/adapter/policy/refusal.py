"""Reasons of a tier's refusals. Separate, because the deletion of keyspaces uses tiers without a policy, and without
the packages that enforcement needs."""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    NO_POLICY = "no_policy"
    MALFORMED_KEYSPACE = "malformed_keyspace"
    UNKNOWN_KEYSPACE = "unknown_keyspace"
    STALE = "stale"
    RETENTION = "retention"
    BREAKER_OPEN = "breaker_open"
    SLOT_MOVING = "slot_moving"
    QUEUE_FULL = "queue_full"
    QUEUE_BYTES = "queue_bytes"
    TIER_FULL = "tier_full"
    OVER_BUDGET = "over_budget"
    TOMBSTONE = "tombstone"
    REVOKED = "revoked"
    LATE = "late"
    NO_KEY = "no_key"
    KEY_SPENT = "key_spent"
    NOT_A_READER = "not_a_reader"
    NOT_IN_POOL = "not_in_pool"
    NOT_ALLOWED = "not_allowed"
    RECOVERING = "recovering"
    READ_ONLY = "read_only"
    NO_FINGERPRINT = "no_fingerprint"
    SLOWER_THAN_PREFILL = "slower_than_prefill"
