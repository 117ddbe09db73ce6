"""Receipts of erasures: facts, the claims that follow from them, signed records, chains."""
