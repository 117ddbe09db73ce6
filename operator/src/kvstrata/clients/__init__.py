"""The operator's hands: API server, lease, certificates, gates and Redis. No decision is made here."""
