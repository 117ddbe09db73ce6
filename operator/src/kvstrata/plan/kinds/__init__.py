"""One plan for each kind: from the world and the time to objects, actions and status."""
