"""What an interrupted forward leaves does not reach what is done to the cache next.

torch calls no hook after a `KeyboardInterrupt`, so half a forward is still there when the user, who
stopped a generation, resets the cache, takes tokens back or chooses rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    FULL,
    assert_close,
    cache_argument,
    draft_model,
    forward,
    left_padded,
    prompt,
    tiny_model,
)

from oasis_hf import OasisCache
from oasis_hf import generation as batched

pytestmark = pytest.mark.usefixtures("small_slabs")

BATCH, HELD, ROWS = 2, 60, 3


def read(model: Any, built: str, columns: int = HELD) -> OasisCache:
    """A cache that holds a text, and rows after it that may be rejected."""
    cache = OasisCache(model if built == "model" else model.config, **FULL)
    forward(model, prompt(columns, BATCH), cache)
    cache.expect_drafts()
    forward(model, prompt(ROWS, BATCH, seed=1), cache)
    return cache


def interrupt(model: Any, cache: OasisCache, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that stops between two layers."""

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[0].mlp, "forward", stop)
        with pytest.raises(KeyboardInterrupt):
            forward(model, prompt(rows, BATCH, seed=2), cache)


def then(operation: Callable[[OasisCache], Any]) -> Callable[[OasisCache], OasisCache]:
    def run(cache: OasisCache) -> OasisCache:
        operation(cache)
        return cache

    return run


OPERATIONS: dict[str, Callable[[OasisCache], OasisCache]] = {
    "reset": then(lambda c: c.reset()),
    "crop": then(lambda c: c.crop(-2)),
    "crop nothing": then(lambda c: c.crop(0)),
    "commit": then(lambda c: c.commit(ROWS, torch.tensor([1, 3]))),
    "reorder": then(lambda c: c.reorder_cache(torch.tensor([1, 0]))),
    "repeat": then(lambda c: c.batch_repeat_interleave(2)),
    "select": then(lambda c: c.batch_select_indices(torch.tensor([1]))),
    "fork": lambda c: c.fork(),
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("built", ["model", "config"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_after_an_interrupt_is_that_operation_without_it(
    name: str, built: str, kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(kind)
    cache, other = read(model, built), read(model, built)
    interrupt(model, cache, rows, monkeypatch)
    cache, other = OPERATIONS[name](cache), OPERATIONS[name](other)
    assert cache.get_seq_length() == other.get_seq_length() == cache.ledger.columns
    real = other.ledger.real()
    batch = other.offloaded[0].batch_size if other.get_seq_length() else BATCH
    ids = prompt(4, 1, seed=3).expand(batch, -1)
    mask = None
    if real is not None:
        mask = torch.cat([real, torch.ones(batch, 4, dtype=torch.bool)], 1).long()
    assert_close(forward(model, ids, cache, mask), forward(model, ids, other, mask))
    assert cache.get_seq_length() == other.get_seq_length()


def test_what_reached_every_layer_counts_as_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after the last layer: what is taken back is what `get_seq_length` says."""
    model = tiny_model("llama")
    cache, other = read(model, "model"), read(model, "model")

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.lm_head, "forward", stop)
        with pytest.raises(KeyboardInterrupt):
            forward(model, prompt(ROWS, BATCH, seed=2), cache)
    forward(model, prompt(ROWS, BATCH, seed=2), other)
    held = cache.get_seq_length()
    for one in (cache, other):
        one.crop(-1)
    ids = prompt(1, BATCH, seed=3)
    assert_close(forward(model, ids, cache), forward(model, ids, other))
    assert cache.get_seq_length() == held


@pytest.mark.parametrize("dense_layers", [(), (0,), (1,)])
def test_an_interrupted_round_of_drafts_leaves_each_sequence_as_it_was(
    dense_layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop lays a batch of uneven sequences out anew when it ends, also like this."""
    model = tiny_model("llama")
    cache = OasisCache(model, dense_layers=dense_layers, **FULL)
    ids, mask = left_padded([0, 37, 130])
    whole, rounds = model.model.layers[0].mlp.forward, []

    def stop(*given: Any, **named: Any) -> Any:
        rounds.append(1)
        if len(rounds) == 6:
            raise KeyboardInterrupt
        return whole(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[0].mlp, "forward", stop)
        with pytest.raises(KeyboardInterrupt):
            batched.generate(
                model,
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=40,
                draft=draft_model("llama", "fair"),
                **{cache_argument(model): cache},
            )
    real, fed = cache.ledger.real(), cache.ledger.ids()
    assert real is not None and fed is not None
    assert len(set(real.sum(1).tolist())) == 3 and not real[:, -1].all(), "uneven sequences"
    new = prompt(1, 3, seed=4)
    got = forward(model, new, cache, torch.cat([real, torch.ones(3, 1).bool()], 1).long())
    for row, tokens in enumerate(fed):
        text = torch.cat([tokens[real[row]], new[row]])[None]
        want = forward(model, text, OasisCache(model, **FULL))
        assert_close(got[row, -1], want[0, -1])
