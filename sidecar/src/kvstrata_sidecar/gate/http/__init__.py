"""HTTP server and client of the gate, TLS, draining."""
