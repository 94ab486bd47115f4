"""A small model that looks facts up at 128K tokens: its language, how it begins, its training."""
