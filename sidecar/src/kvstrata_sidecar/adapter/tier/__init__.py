"""Common parts of all tiers: interface, tasks, queues, encryption, buffers."""
