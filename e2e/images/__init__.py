"""The images that tests and demos run: the product's own, a CPU engine with its cache server, and servers of tiers."""
