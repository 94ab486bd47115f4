"""The layers of a cache, and what they have in common."""
