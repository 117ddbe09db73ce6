"""The policy in force: enforcement, data keys, pools, ages."""
