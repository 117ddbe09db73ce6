"""A managed cluster of real servers in networks of their own, to which anything may happen at any time."""
