"""RESP client of the shared tier: connections, cluster slots, block transfer."""
