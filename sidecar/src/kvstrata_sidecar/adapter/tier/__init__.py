"""What every tier has: its interface, tasks, queues, encryption, buffers."""
