"""What pods enforce: bundles, budgets, keyspaces, data keys, pools."""
