"""Budgets of tiers: admission of guarantees, capacity, usage."""
