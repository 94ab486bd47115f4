"""A mask that says something else about earlier columns than when they came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    FULL,
    assert_close,
    dense_cache,
    forward,
    generate,
    left_padded,
    prompt,
    tiny_model,
)
from torch import Tensor

from oasis_hf import OasisCache, OasisUnsupportedError

pytestmark = pytest.mark.usefixtures("small_slabs")

KINDS = ["llama", "gemma3"]


def ended(tokens: Tensor, counts: list[int]) -> Tensor:
    """`[B, n]` mask of generated tokens of which row i keeps the first `counts[i]`."""
    return torch.arange(tokens.shape[1])[None] < torch.tensor(counts)[:, None]


def twins(kind: str, **options: Any) -> tuple[Any, OasisCache, Any, Any]:
    """A model with a cache of full budget, and its twin with Transformers' own attention."""
    model, reference = tiny_model(kind), tiny_model(kind, "sdpa")
    return model, OasisCache(model, **(FULL | options)), reference, dense_cache(reference)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [[20, 3], [1, 20], [19, 20]], ids=str)
@pytest.mark.parametrize("new", [1, 5, 40])
def test_row_that_ended_early_is_followed_by_a_next_turn(
    kind: str, counts: list[int], new: int
) -> None:
    """Its padding, fed as tokens while others went on, is hidden from then on."""
    model, cache, reference, dense = twins(kind)
    ids, mask = left_padded([0, 7], 90)
    for target, held in ((model, cache), (reference, dense)):
        answer = generate(target, ids, held, 20, attention_mask=mask)
    text = torch.cat([ids, answer, prompt(new, 2, seed=8)], 1)
    seen = torch.cat([mask, ended(answer, counts), torch.ones(2, new)], 1).long()
    want = generate(reference, text, dense, 12, attention_mask=seen)
    assert torch.equal(generate(model, text, cache, 12, attention_mask=seen), want)


@pytest.mark.parametrize("held", [0, 60, 95])
@pytest.mark.parametrize("place", [40, 88], ids=["in the middle", "at the end"])
def test_pads_that_generate_masks_by_itself(held: int, place: int) -> None:
    """Without a mask `generate` hides every pad token, wherever it stands, held already or not."""
    model, cache, reference, dense = twins("llama")
    text = prompt(100, 2)
    text[0, place : place + 4] = 0
    answers = []
    for target, cache_ in ((model, cache), (reference, dense)):
        if held:
            forward(target, text[:, :held], cache_)
        answers.append(generate(target, text, cache_, 12, attention_mask=None))
    assert torch.equal(*answers)


@pytest.mark.parametrize("hidden", [(0, 1), (0, 90), (30, 33), (50, 75), (88, 90)], ids=str)
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("built", ["model", "config"])
def test_columns_hidden_later_are_not_attended_to(
    hidden: tuple[int, int], rows: int, built: str
) -> None:
    """Those of one row, anywhere; the other row is as it was."""
    model, reference = tiny_model("llama"), tiny_model("llama", "sdpa")
    cache, dense = OasisCache(model if built == "model" else model.config, **FULL), None
    dense = dense_cache(reference)
    ids = prompt(100, 2)
    for target, held in ((model, cache), (reference, dense)):
        forward(target, ids[:, :90], held, torch.ones(2, 90).long())
    mask = torch.ones(2, 90 + rows).long()
    mask[1, hidden[0] : hidden[1]] = 0
    got = forward(model, ids[:, 90 : 90 + rows], cache, mask)
    assert_close(got, forward(reference, ids[:, 90 : 90 + rows], dense, mask))
    # And so they stay.
    mask = torch.cat([mask, torch.ones(2, 1).long()], 1)
    got = forward(model, ids[:, -1:], cache, mask)
    assert_close(got, forward(reference, ids[:, -1:], dense, mask))


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("built", ["model", "config"])
def test_columns_revealed_later_are_refused(rows: int, built: str) -> None:
    """Padding is not stored; what the refusal leaves is usable."""
    model = tiny_model("llama")
    cache = OasisCache(model if built == "model" else model.config, **FULL)
    ids, mask = left_padded([0, 7], 90)
    forward(model, ids[:, :80], cache, mask[:, :80])
    shown = mask[:, : 80 + rows].clone()
    shown[1, 5] = 1
    with pytest.raises(ValueError, match=r"attention_mask: got 1 for column 5 of sequence 1"):
        forward(model, ids[:, 80 : 80 + rows], cache, shown)
    assert cache.get_seq_length() == 80
    got = forward(model, ids[:, 80 : 80 + rows], cache, mask[:, : 80 + rows])
    whole = forward(model, ids[:, : 80 + rows], OasisCache(model, **FULL), mask[:, : 80 + rows])
    assert_close(got, whole[:, 80:])


def test_no_mask_leaves_earlier_columns_as_they_were() -> None:
    model = tiny_model("llama")
    ids, mask = left_padded([0, 7], 90)
    caches = [OasisCache(model, **FULL) for _ in range(2)]
    for cache in caches:
        forward(model, ids[:, :89], cache, mask[:, :89])
    positions = mask.cumsum(1)[:, -1:] - 1
    silent = forward(model, ids[:, 89:], caches[0], position_ids=positions)
    assert_close(silent, forward(model, ids[:, 89:], caches[1], mask))


@pytest.mark.parametrize("options", [{"dense_layers": [0]}, {"dense_layers": [1]}], ids=str)
def test_layers_kept_dense_follow_the_mask_too(options: dict) -> None:
    model, cache, reference, dense = twins("llama", **options)
    ids, mask = prompt(100, 2), torch.ones(2, 95).long()
    for target, held in ((model, cache), (reference, dense)):
        forward(target, ids[:, :90], held)
    mask[0, 70:90] = 0
    got = forward(model, ids[:, 90:95], cache, mask)
    assert_close(got, forward(reference, ids[:, 90:95], dense, mask))


def test_a_forward_that_fails_puts_hidden_tokens_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, reference, dense = twins("llama")
    ids, mask = prompt(100, 2), torch.ones(2, 95).long()
    for target, held in ((model, cache), (reference, dense)):
        forward(target, ids[:, :90], held)
    mask[1, 30:60] = 0

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="interrupted"):
            forward(model, ids[:, 90:95], cache, mask)
    got = forward(model, ids[:, 90:95], cache, torch.ones(2, 95).long())
    assert_close(got, forward(reference, ids[:, 90:95], dense, torch.ones(2, 95).long()))


@pytest.mark.parametrize("built", ["model", "config"])
def test_what_is_known_of_a_forward_ends_with_it(
    built: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that was vouched for, in a forward that never reached the cache, says no more."""
    model, reference = tiny_model("llama"), tiny_model("llama", "sdpa")
    cache, dense = OasisCache(model if built == "model" else model.config, **FULL), None
    dense = dense_cache(reference)
    ids, mask = prompt(100, 2), torch.ones(2, 95).long()
    for target, held in ((model, cache), (reference, dense)):
        forward(target, ids[:, :90], held)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[0].mlp, "forward", fail)
        cache.expect(agreed=True)
        with pytest.raises(RuntimeError, match="interrupted"):
            forward(model, ids[:, 90:95], cache, mask)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.embed_tokens, "forward", fail)
        if built == "model":
            # What a cache of a config expects, it learns to be over by the first layer alone.
            cache.expect(agreed=True)
        with pytest.raises(RuntimeError, match="interrupted"):
            forward(model, ids[:, 90:95], cache, mask)
    mask[1, 30:60] = 0
    if built == "config":
        with pytest.raises(OasisUnsupportedError, match="an earlier forward broke off"):
            forward(model, ids[:, 90:95], cache, mask)
    got = forward(model, ids[:, 90:95], cache, mask)
    assert_close(got, forward(reference, ids[:, 90:95], dense, mask))
