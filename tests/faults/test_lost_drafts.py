"""`model.generate(custom_generate=...)` keeps some arguments to itself: a draft that is lost."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import FULL, cache_argument, draft_model, generate, prompt, tiny_model
from torch import Tensor

from oasis_hf import OasisCache
from oasis_hf.generation import generate as speculate
from oasis_hf.generation.speculation import Speculation

LOST = "no source of drafts arrived"


@contextmanager
def silence() -> Iterator[None]:
    """Assert that nothing is said of drafts."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    assert not [one for one in said if LOST in str(one.message)]


def call(**options: Any) -> Tensor:
    """Through `model.generate`."""
    model = tiny_model("llama")
    ids = prompt()
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 12,
        "do_sample": False,
        "custom_generate": speculate,
        cache_argument(model): OasisCache(model, **FULL),
    } | options
    return model.generate(ids, **options)[:, ids.shape[1] :]


def plain() -> Tensor:
    model = tiny_model("llama")
    return generate(model, prompt(), OasisCache(model, **FULL), 12)


def test_a_draft_that_transformers_does_not_hand_on_is_told() -> None:
    """The tokens are right all the same, one by one."""
    with pytest.warns(UserWarning, match=LOST) as said:
        got = call(assistant_model=draft_model("llama", "fair"))
    assert torch.equal(got, plain())
    told = [str(one.message) for one in said if LOST in str(one.message)]
    assert len(told) == 1
    for part in ("assistant_model", "draft=", "prompt_lookup_num_tokens", "Speculation(0)"):
        assert part in told[0]


def test_it_is_told_once() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            call()
    assert len([one for one in said if LOST in str(one.message)]) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"draft": True},
        {"prompt_lookup_num_tokens": 3},
        {"speculation": Speculation(0)},
    ],
    ids=lambda x: next(iter(x)),
)
def test_nothing_is_said_where_drafts_arrive_or_are_not_wanted(options: dict[str, Any]) -> None:
    if "draft" in options:
        options = {"draft": draft_model("llama", "fair")}
    with silence():
        assert torch.equal(call(**options), plain())


def test_nothing_is_said_where_no_draft_can_get_lost() -> None:
    """Called directly, and from a folder, all arguments arrive."""
    model, ids = tiny_model("llama"), prompt()
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 12,
        "do_sample": False,
    }
    with silence():
        for draft in (None, draft_model("llama", "fair")):
            cache = {cache_argument(model): OasisCache(model, **FULL)}
            got = speculate(model, ids, assistant_model=draft, **cache, **options)
            assert torch.equal(got[:, ids.shape[1] :], plain())
        folder = Path(__file__).parents[2] / "examples" / "custom_generate"
        call(
            custom_generate=str(folder),
            trust_remote_code=True,
            assistant_model=draft_model("llama", "fair"),
        )
