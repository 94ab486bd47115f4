"""Studies of one question each: no prompts, one JSON file of results."""
