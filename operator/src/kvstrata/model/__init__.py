"""What the operator knows of a domain at one moment: typed, frozen, without any way to change the world."""
