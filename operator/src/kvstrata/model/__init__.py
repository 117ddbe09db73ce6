"""What the operator knows of a domain at one moment: typed and frozen."""
