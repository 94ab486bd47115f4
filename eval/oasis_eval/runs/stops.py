"""When an answer is over. No imports: `oasis_eval.peers` asks the same where oasis_hf is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STOPS = {"string_match_all", "string_match_part"}
"""Metrics by which an answer that is right cannot get better, so that decoding stops."""


def ends(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end an answer."""
    of_model = model.generation_config.eos_token_id
    listed = of_model if isinstance(of_model, list) else [of_model]
    return {token for token in (tokenizer.eos_token_id, *listed) if token is not None}


def stop(metric: str, references: list[str]) -> Callable[[str], bool]:
    """Whether an answer can get no better."""
    return lambda text: metric in STOPS and score_is_full(metric, text, references)


def score_is_full(metric: str, text: str, references: list[str]) -> bool:
    """Whether all references, or for questions any, are there; cheaper than the metric."""
    found = [reference.lower() in text.lower() for reference in references]
    return all(found) if metric == "string_match_all" else any(found)
