"""Requests and answers between operator, gate, adapter and deletion Jobs."""
