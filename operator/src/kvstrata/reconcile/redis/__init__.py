"""Workers for Redis tiers: probes of servers, credentials, managed clusters."""
