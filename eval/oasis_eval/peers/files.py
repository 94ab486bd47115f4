"""The files that pass between the two environments: prompts go out, answers come back.

Only the standard library: both sides import this.
"""

from __future__ import annotations

PROMPT = ("task", "context", "number", "tokens", "depths", "references")
"""What names a prompt, and what an answer has of it."""
NEEDED = (*PROMPT, "limit", "ids")
"""What a line of the file of prompts must have."""
FIELDS = (*PROMPT, "arm", "answers", "ids")
"""What an answer must have; "attended" and "seconds" are shown where they are."""
SAME = ("tokens", "depths", "references")
"""What an answer must share with the run's own answers to its sample."""
ANSWERS, ABOUT = "answers.jsonl", "about.json"
"""Files of a folder of answers: an answer a line, and what they were made with."""
COMMAND = "python -m oasis_eval.peers"
"""What writes such a folder."""
