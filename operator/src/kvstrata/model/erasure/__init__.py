"""State of an erasure: its order, the reported facts, and which of them count."""
