"""What is known of an erasure: its order, the facts that were reported, and which of them count."""
