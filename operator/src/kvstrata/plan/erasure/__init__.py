"""Erasures: facts from the world, outstanding orders, the next step, the receipt."""
