"""Exact verification, layer by layer: the tail of a sequence that never saw the drafts."""

from __future__ import annotations

import pytest
import torch
from engines import REFERENCE, TRITON
from helpers import SPARSE, random_qkv, tiny_model

from oasis_hf import OasisCache
from oasis_hf.config import OasisConfigError


@pytest.mark.parametrize("index", ["keys2bit", "minmax"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_tail_forgets_rejected_drafts(index: str, backend: str) -> None:
    """Behind each crop: same lengths, tail and outputs as steps that never saw the drafts."""
    if backend == "triton":
        pytest.importorskip("triton")
    engine = TRITON if backend == "triton" else REFERENCE
    options = SPARSE | {"index": index}
    generator = torch.Generator().manual_seed(3)
    drafted, plain = engine.driver(verification="exact", **options), engine.driver(**options)
    heads = drafted.heads, drafted.kv_heads
    first = random_qkv(generator, 1, 232, *heads)
    drafted.cache.activate_past_recording()
    for driver in (drafted, plain):
        driver.feed(*first)
    for step in range(engine.pick(30, 5)):
        rows = 1 + step % 6
        q, k, v = random_qkv(generator, 1, rows, *heads)
        kept = 1 + (step * 5) % rows
        out = drafted.feed(q, k, v)[0][:, :, :kept]
        drafted.cache.crop(kept - rows)
        drafted.seen = drafted.seen[:, : drafted.cache.get_seq_length()]
        for row in range(kept):
            part = slice(row, row + 1)
            alone = plain.feed(q[:, :, part], k[:, :, part], v[:, :, part])[0]
            torch.testing.assert_close(out[:, :, part], alone, atol=1e-5, rtol=1e-5)
        ours, theirs = drafted.layer, plain.layer
        assert torch.equal(ours.parts.frontier.lengths, theirs.parts.frontier.lengths)
        assert torch.equal(ours.parts.frontier.committed, theirs.parts.frontier.committed), step
        blocks = int(ours.parts.frontier.committed[0]) // ours.parts.geometry.block
        assert not (ours.parts.residency.block_of_slot[..., :-1] >= blocks).any()
        assert not (ours.parts.residency.slot_of_block[..., blocks:-1] >= 0).any()
    assert int(drafted.layer.parts.frontier.committed[0]) > 192, "no group left the tail"


def test_drafts_may_not_leave_the_tail_unverified() -> None:
    with pytest.raises(OasisConfigError, match="at least max_rows - 2"):
        OasisCache(tiny_model("llama"), verification="exact", recent_tokens=8, max_rows=16)
    with pytest.raises(OasisConfigError, match="verification: got 'rows', expected one of shared"):
        OasisCache(tiny_model("llama"), verification="rows")
