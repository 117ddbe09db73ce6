"""One plan per kind: from the world and the time to objects, actions and status."""
