"""Erasures: what is gathered, what is outstanding, the next step, the receipt."""
