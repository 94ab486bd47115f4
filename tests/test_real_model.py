"""A real model on a real text: a full budget changes no token, a small one reports itself."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from helpers import dense_cache, forward, generate
from torch import Tensor

from oasis_hf import OasisCache
from oasis_hf.tools import packaged

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec(packaged.PACKAGE) is None, reason=packaged.INSTALL_COMMAND
    ),
]

CONTEXT = 2010
NEW = 12
FULL = {"budget": 2304, "block_size": 64, "head_room": 1.0}
"""Covers all; large blocks, because the reference's time goes with their number."""


@pytest.fixture(scope="module")
def model() -> Any:
    """SmolLM2-135M-Instruct in fp32; it goes on past the end of a text."""
    loaded, _ = packaged.load(packaged.smollm2(), dtype=torch.float32, device_map="cpu")
    loaded.generation_config.eos_token_id = None
    return loaded


@pytest.fixture(scope="module")
def ids() -> Tensor:
    """The first tokens of the language reference of Python."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(packaged.smollm2())
    tokens = tokenizer(packaged.prose(12_000), return_tensors="pt").input_ids
    assert tokens.shape[1] >= CONTEXT
    return tokens[:, :CONTEXT]


@pytest.fixture(scope="module")
def dense_answer(model: Any, ids: Tensor) -> Tensor:
    """What the model says with Transformers' own cache."""
    cache = dense_cache(model)
    forward(model, ids[:, :-1], cache, logits_to_keep=1)
    return generate(model, ids, cache, tokens=NEW)


@pytest.fixture(scope="module")
def read(model: Any, ids: Tensor) -> OasisCache:
    """A cache that has read all but the last token; tests fork it."""
    cache = OasisCache(model, **FULL)
    forward(model, ids[:, :-1], cache, logits_to_keep=1)
    return cache


@pytest.mark.parametrize("mode", ["greedy", "prompt lookup"])
def test_full_budget_is_dense(
    mode: str, model: Any, ids: Tensor, read: OasisCache, dense_answer: Tensor
) -> None:
    options = {"greedy": {}, "prompt lookup": {"prompt_lookup_num_tokens": 5}}[mode]
    cache = read.fork()
    got = generate(model, ids, cache, tokens=NEW, **options)
    assert torch.equal(got, dense_answer)
    stats = cache.stats()
    assert stats.context_tokens >= CONTEXT + NEW - 1
    assert "sparsity never engaged" in stats.note
    assert stats.hit_rate > 0.99 and stats.refused == 0
    if mode == "prompt lookup":
        assert 0 <= stats.accepted <= stats.drafted and stats.rounds > 0
        assert stats.accepted + stats.rounds <= NEW + 5


def test_small_budget_reports_itself(model: Any, ids: Tensor, read: OasisCache) -> None:
    cache = read.fork(budget=256, block_size=16, head_room=2.0, on_miss="skip", fetch_cap=0.25)
    generate(model, ids, cache, tokens=NEW)
    stats = cache.stats()
    assert stats.steps == NEW and stats.sparse_layers == 30 and stats.native_layers == 0
    assert (stats.budget_tokens, stats.resident_tokens) == (256, 512)
    shares = (stats.hit_rate, stats.fetched_now, stats.admitted, stats.refused)
    assert all(0 <= share <= 1 for share in (*shares, stats.turnover))
    assert sum(shares) == pytest.approx(1)
    # Neighbouring tokens look at the same places, though not at all the same.
    assert 0.5 < stats.hit_rate < 1 and 0 < stats.turnover < 0.5
    assert stats.fetched_now == 0
    # 30 layers x 3 heads x (64 + 64) numbers of 4 bytes.
    token_bytes = 30 * 3 * 128 * 4
    assert stats.full_kv_bytes == (CONTEXT + NEW - 1) * token_bytes <= stats.host_bytes
    assert stats.bytes_filled <= stats.resident_tokens * token_bytes
    assert stats.bytes_filled <= stats.bytes_fetched < stats.full_kv_bytes
    assert stats.index_bytes < stats.hbm_bytes < stats.full_kv_bytes / 2
    assert stats.note == (
        f"the working set is {stats.hbm_bytes / stats.full_kv_bytes:.0%} of the full KV"
    )
    assert stats.note in str(stats)
