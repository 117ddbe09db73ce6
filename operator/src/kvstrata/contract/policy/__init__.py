"""The policy that pods enforce: bundles, budgets, keyspaces, data keys, pools."""
