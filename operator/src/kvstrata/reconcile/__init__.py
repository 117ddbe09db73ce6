"""From events to writes: a store that knows the world, a queue of keys, and one loop that carries out plans."""
