"""Saving, loading, forking and copying a cache, and telling whose it is."""
