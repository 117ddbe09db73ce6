"""Data keys: where they are kept, and which are drawn, unwrapped and destroyed."""
