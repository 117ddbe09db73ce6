"""Builders for deletion Jobs and receipts."""
