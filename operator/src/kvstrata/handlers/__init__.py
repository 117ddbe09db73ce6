"""kopf's part: watching. A handler hands an object to the store and the keys that it concerns to the queue."""
