"""Exact verification: assisted decoding gives the tokens of plain decoding at any budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import draft_model, generate, prompt, tiny_model

from oasis_hf import OasisCache

SPARSE = {"budget": 64, "sink_tokens": 16, "recent_tokens": 16, "max_rows": 8}
TOKENS = 70
"""More than two groups, so that groups leave the tail inside verifications."""


def repetitive(length: int) -> torch.Tensor:
    """A prompt `[1, length]` in which looking drafts up finds some."""
    return prompt(40).repeat(1, length // 40 + 1)[:, :length]


@pytest.mark.parametrize(
    ("draft", "index"),
    [(draft, "keys2bit") for draft in ("good", "fair", "bad", "lookup")] + [("fair", "minmax")],
)
def test_assisted_decoding_gives_the_tokens_of_plain_decoding(draft: str, index: str) -> None:
    model = tiny_model("llama")
    ids = repetitive(300) if draft == "lookup" else prompt(300)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if draft != "lookup":
        options = {"assistant_model": draft_model("llama", draft)}
    plain = generate(model, ids, OasisCache(model, index=index, **SPARSE), TOKENS)
    cache = OasisCache(model, index=index, verification="exact", **SPARSE)
    assert torch.equal(generate(model, ids, cache, TOKENS, **options), plain)
    stats = cache.stats()
    assert stats.rounds > 0 and stats.drafted > stats.rounds
    if draft == "bad":
        assert stats.accepted < stats.drafted / 4
    full = generate(model, ids, OasisCache(model, budget=2048), TOKENS)
    assert not torch.equal(plain, full), "the budget is not sparse enough to tell"


def test_sharing_one_choice_does_change_tokens() -> None:
    """What the exact mode is for; if this ever fails, the test above proves nothing."""
    model, differ = tiny_model("llama"), 0
    for seed in range(3):
        ids = prompt(300, seed=seed)
        plain = generate(model, ids, OasisCache(model, **SPARSE), TOKENS)
        cache = OasisCache(model, **SPARSE)
        draft = draft_model("llama", "fair")
        differ += not torch.equal(generate(model, ids, cache, TOKENS, assistant_model=draft), plain)
    assert differ
