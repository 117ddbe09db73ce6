"""Eager invalidations: facts are collected and stored, `plan.erasure.next_step` decides, orders are executed."""
