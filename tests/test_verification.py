"""Verification row by row: at any budget the tokens of plain decoding, and its tail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Driver, draft_model, generate, prompt, random_qkv, tiny_model

from oasis_hf import OasisCache
from oasis_hf.config import OasisConfigError

SPARSE = {"budget": 64, "sink_tokens": 16, "recent_tokens": 16, "max_rows": 8}
TOKENS = 70
"""More than two groups, so that groups leave the tail inside verifications."""


def repetitive(length: int) -> torch.Tensor:
    """A prompt `[1, length]` in which looking drafts up finds some."""
    return prompt(40).repeat(1, length // 40 + 1)[:, :length]


@pytest.mark.parametrize("index", ["keys2bit", "minmax"])
@pytest.mark.parametrize("draft", ["good", "fair", "bad", "lookup"])
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


@pytest.mark.parametrize("index", ["keys2bit", "minmax"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_tail_forgets_rejected_drafts(index: str, backend: str) -> None:
    """Behind each crop: same lengths, tail and outputs as steps that never saw the drafts."""
    if backend == "triton":
        pytest.importorskip("triton")
    options = SPARSE | {"index": index, "backend": backend}
    generator = torch.Generator().manual_seed(3)
    drafted, plain = Driver(verification="exact", **options), Driver(**options)
    first = random_qkv(generator, 1, 232)
    drafted.cache.activate_past_recording()
    for driver in (drafted, plain):
        driver.feed(*first)
    for step in range(30 if backend == "reference" else 5):
        rows = 1 + step % 6
        q, k, v = random_qkv(generator, 1, rows)
        kept = 1 + (step * 5) % rows
        out = drafted.feed(q, k, v)[0][:, :, :kept]
        drafted.cache.crop(kept - rows)
        drafted.seen = drafted.seen[:, : drafted.cache.get_seq_length()]
        for row in range(kept):
            part = slice(row, row + 1)
            alone = plain.feed(q[:, :, part], k[:, :, part], v[:, :, part])[0]
            torch.testing.assert_close(out[:, :, part], alone, atol=1e-5, rtol=1e-5)
        ours, theirs = drafted.layer, plain.layer
        assert torch.equal(ours.lengths, theirs.lengths)
        assert torch.equal(ours.committed, theirs.committed), step
        blocks = int(ours.committed[0]) // ours.geometry.block
        assert not (ours.residency.block_of_slot[..., :-1] >= blocks).any()
        assert not (ours.residency.slot_of_block[..., blocks:-1] >= 0).any()
    assert int(drafted.layer.committed[0]) > 192, "no group left the tail"


def test_drafts_may_not_leave_the_tail_unverified() -> None:
    with pytest.raises(OasisConfigError, match="at least max_rows - 2"):
        OasisCache(tiny_model("llama"), verification="exact", recent_tokens=8, max_rows=16)
    with pytest.raises(OasisConfigError, match="verification: got 'rows', expected one of shared"):
        OasisCache(tiny_model("llama"), verification="rows")
