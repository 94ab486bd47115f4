"""A call that is refused, or that fails, leaves the cache as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    FULL,
    WINDOW,
    assert_close,
    forward,
    generate,
    prompt,
    tiny_model,
)

from oasis_hf import OasisCache, OasisUnsupportedError

pytestmark = pytest.mark.usefixtures("small_slabs")

TEXT = 120
HELD = 60


def short_mask(model: Any, cache: OasisCache, rows: int = 7, **options: Any) -> None:
    ids = prompt(rows, seed=8)
    forward(model, ids, cache, torch.ones_like(ids), **options)


REFUSED: dict[str, Callable[[Any, OasisCache], Any]] = {
    "new tokens under a mask of their own length": short_mask,
    "the same, logits of one": lambda m, c: short_mask(m, c, logits_to_keep=1),
    "one token under a mask of its own length": lambda m, c: short_mask(m, c, 1),
    "generate on new tokens alone": lambda m, c: generate(m, prompt(7, seed=8), c, 4),
    "a mask that is too long": lambda m, c: forward(
        m, prompt(7), c, torch.ones(1, HELD + 9).long()
    ),
    "another batch": lambda m, c: forward(m, prompt(7, 2), c),
    "another batch and its mask": lambda m, c: forward(
        m, prompt(7, 2), c, torch.ones(2, HELD + 7).long()
    ),
    "crop beyond the beginning": lambda m, c: c.crop(-HELD - 1),
    "rows that there are not": lambda m, c: c.reorder_cache(torch.tensor([1])),
    "rows that there are not, selected": lambda m, c: c.batch_select_indices(torch.tensor([3])),
    "no rows": lambda m, c: c.batch_select_indices(torch.tensor([], dtype=torch.long)),
    "no repeats": lambda m, c: c.batch_repeat_interleave(0),
    "commit of more than was fed": lambda m, c: c.commit(3, torch.tensor([4])),
    "a 4-D mask": lambda m, c: forward(
        m, prompt(3), c, attention_mask=torch.zeros(1, 1, 3, HELD + 3)
    ),
}


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("built", ["model", "config"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_call_changes_nothing(name: str, built: str, kind: str) -> None:
    model = tiny_model(kind)
    if built == "config" and name == "generate on new tokens alone":
        pytest.skip("only a cache that knows its model sees what generate is given")
    cache = OasisCache(model if built == "model" else model.config, **FULL)
    text = prompt(TEXT)
    forward(model, text[:, :HELD], cache)
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError)):
            REFUSED[name](model, cache)
        assert cache.get_seq_length() == HELD
    want = forward(model, text, OasisCache(model, **FULL))[:, HELD:]
    assert_close(forward(model, text[:, HELD:], cache), want)


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("interrupted")


@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_forward_that_fails_in_any_layer_is_undone(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(kind)
    cache = OasisCache(model, **FULL)
    text = prompt(TEXT)
    forward(model, text[:, :HELD], cache)
    for number in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[number].mlp, "forward", fail)
            with pytest.raises(RuntimeError, match="interrupted"):
                forward(model, text[:, HELD : HELD + rows], cache)
    want = forward(model, text, OasisCache(model, **FULL))[:, HELD:]
    assert_close(forward(model, text[:, HELD:], cache), want)


@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_without_a_hook_the_next_forward_says_so_and_undoes_it(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of a config does not see a forward fail; where its layers differ it notices."""
    model = tiny_model(kind)
    cache = OasisCache(model.config, **FULL)
    text = prompt(TEXT)
    forward(model, text[:, :HELD], cache)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[0].mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="interrupted"):
            forward(model, text[:, HELD : HELD + rows], cache)
    with pytest.raises(RuntimeError, match="taken back, call again"):
        forward(model, text[:, HELD:], cache)
    want = forward(model, text, OasisCache(model, **FULL))[:, HELD:]
    assert_close(forward(model, text[:, HELD:], cache), want)


def test_crop_that_a_sliding_layer_refuses_changes_no_layer() -> None:
    model = tiny_model("gemma3", layers=None)
    cache = OasisCache(model, **FULL)
    text = prompt(TEXT)
    forward(model, text[:, : 2 * WINDOW], cache)
    with pytest.raises((RuntimeError, ValueError)):
        cache.crop(-WINDOW)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [2 * WINDOW] * 2
    want = forward(model, text, OasisCache(model, **FULL))[:, 2 * WINDOW :]
    assert_close(forward(model, text[:, 2 * WINDOW :], cache), want)


def test_crop_beyond_what_a_sliding_layer_recorded_is_refused() -> None:
    """Transformers cuts its window short instead, and the next forward fails on a size."""
    model, ids = tiny_model("gemma3"), prompt(70)
    cache, twin = (OasisCache(model, **FULL) for _ in range(2))
    answers = [generate(model, ids, c, 20, prompt_lookup_num_tokens=3) for c in (cache, twin)]
    with pytest.raises(OasisUnsupportedError, match=r"crop: got -30, but sliding layer 0 has"):
        cache.crop(-30)
    assert cache.get_seq_length() == twin.get_seq_length()
    new = torch.cat([ids, answers[0], prompt(5, seed=9)], 1)[:, cache.get_seq_length() :]
    assert torch.equal(forward(model, new, cache), forward(model, new, twin))
