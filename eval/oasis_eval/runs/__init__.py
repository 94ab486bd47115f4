"""The models answer: prompts are read once, and every arm continues a copy of what was read."""
