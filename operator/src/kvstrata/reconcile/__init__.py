"""From events to writes: a store of the world, a queue of keys, and one loop that carries out plans."""
