"""All that is known of a namespace: typed, and never changed by a plan."""
