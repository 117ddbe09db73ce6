"""Eager invalidations, carried out: facts are gathered and kept, and what they owe is ordered.

`plan.erasure.next_step` says what comes next; nothing here decides. Who deletes from tiers and who writes receipts are
behind `ports`, so that neither is needed to test the rest.
"""
