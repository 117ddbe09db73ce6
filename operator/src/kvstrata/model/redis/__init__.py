"""What is known of Redis servers: clusters, credentials, external servers."""
