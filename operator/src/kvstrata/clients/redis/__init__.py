"""Clients of Redis servers: administration, probes, slot migration, verification."""
