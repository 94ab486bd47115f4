"""Any number of words of a real text, from any sentence on."""

from __future__ import annotations

import re
from collections.abc import Callable


class Prose:
    """A text that starts again at its end.

    Args:
        text: paragraphs of whole sentences.
    """

    def __init__(self, text: str) -> None:
        self.words = text.replace("\n\n", " \n\n").split(" ")
        ends = (n for n, word in enumerate(self.words) if re.search(r"[.!?]$", word))
        self.starts = [0, *(n + 1 for n in ends if n + 1 < len(self.words))]

    def started(self, place: float) -> Callable[[int], str]:
        """A function that gives the first `n` words from the sentence at `place`, 0 to 1, on."""
        start = self.starts[int(place * len(self.starts))]
        turned = self.words[start:] + self.words[:start]

        def first(count: int) -> str:
            repeats, rest = divmod(count, len(turned))
            return " ".join(turned * repeats + turned[:rest]).strip()

        return first
