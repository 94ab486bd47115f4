"""What tasks are made of: real texts, words, names and values."""
