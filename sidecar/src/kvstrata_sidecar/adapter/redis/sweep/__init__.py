"""Background work on the shared tier's indexes."""
