"""Clients of the API server, Lease, certificates, gates and Redis. No decision is made here."""
