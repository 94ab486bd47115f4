"""Facts about Transformers and torch that this package builds on; nothing of the cache itself."""
