"""Nothing that is sized by batch, heads, type, device or capacity outlives a change of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import GPU
from helpers import forward, prompt, tiny_model
from memcheck import memcheck
from operations import Operations

from oasis_hf import OasisCache
from oasis_hf.layers.forward import Forward, Kind
from oasis_hf.ops import AttentionSpec
from oasis_hf.step.inputs import AttentionInputs

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("small_slabs"),
    pytest.mark.skipif(GPU, reason="test_gpu_operations.py has the GPU's"),
]

CHANGES: dict[str, Callable[[Operations], Any]] = {
    "repeat": lambda on: on.repeat(2),
    "select": lambda on: on.select([1]),
    "select more": lambda on: on.select([1, 0, 1]),
    "reorder": lambda on: on.reorder([1, 0]),
    "reset and more": lambda on: (on.reset(3), on.prompt(61, "none", 2)),
    "reset and fewer": lambda on: (on.reset(1), on.prompt(61, "none", 2)),
    "fork": lambda on: (on.fork(), on.repeat(2)),
    "load": lambda on: (on.save_and_load(), on.select([0])),
}


def spoken(batch: int = 2, **options: Any) -> Operations:
    """A layer of the Triton engine behind a prompt; its attention is compared in every step."""
    chosen = {"kv_heads": 1, "recent_tokens": 0, "backend": "triton", "on_miss": "fetch"}
    on = Operations(batch, full=True, padded=False, **chosen | options)
    on.prompt(61, "none", 1)
    return on


@pytest.mark.parametrize(
    ("name", "index"),
    [*((name, "minmax") for name in CHANGES), ("repeat", "keys2bit"), ("select", "keys2bit")],
)
def test_a_change_of_batch_leaves_no_buffer_of_the_old_one(name: str, index: str) -> None:
    """Every address is in bounds, and every row attends to its own tokens.

    After the prompt with one index, with the other after decode steps too; the last step lets a
    group leave the tail.
    """
    with memcheck() as checked:
        on = spoken(index=index)
        if index == "minmax":
            on.decode(1, "none", 3)
        CHANGES[name](on)
        on.decode(2, "none", 4)
    on.check()
    assert checked.checked > 1000


@pytest.mark.parametrize(
    ("owner", "argument", "wrong"),
    [
        ("parts.tail", "k", lambda t: t[:1]),
        ("step", "plan", lambda p: type(p)(1, p.attended.shape[1], p.attended.device)),
        ("step", "plan", lambda p: type(p)(p.attended.shape[0], 1, p.attended.device)),
    ],
    ids=["tail", "another batch", "another budget"],
)
def test_a_stale_buffer_is_refused_before_a_launch(owner: str, argument: str, wrong: Any) -> None:
    """Whoever forgets to renew a buffer gets an error that names it."""
    with memcheck():
        on = spoken()
        # What it needs for the next step it has already: nothing is renewed by growing.
        on.decode(1, "none", 4)
        holder = attrgetter(owner)(on.driver.layer)
        setattr(holder, argument, wrong(getattr(holder, argument)))
        with pytest.raises(ValueError, match="nothing was launched"):
            on.decode(1, "none", 5)


@pytest.mark.parametrize(
    ("part", "wrong", "message"),
    [
        ("lengths", lambda t: t.repeat(2), r"lengths: got \(4,\)"),
        ("lengths", lambda t: t.int(), "expected .* torch.int64"),
        ("committed", lambda t: torch.stack([t, t], 1)[:, 0], "strides"),
        ("positions", lambda t: t.to("meta"), "on meta"),
    ],
    ids=["shape", "type", "layout", "device"],
)
def test_launches_name_what_does_not_fit(part: str, wrong: Any, message: str) -> None:
    """Shape, type, layout and device are compared on the host."""
    from oasis_kernels import triton

    zeros = torch.zeros(2, dtype=torch.long)
    small = torch.zeros(2, dtype=torch.int32)
    given = {
        "lengths": zeros,
        "committed": zeros.clone(),
        "clock": small[:1],
        "counts": small,
        "valid": None,
        "positions": zeros[:, None].clone(),
        "moved": small.clone(),
    }
    given[part] = wrong(given[part])
    with memcheck(), pytest.raises(ValueError, match=message):
        triton.advance(**given, recent=0, group=32, flushes=1)


def test_the_last_rows_of_a_layer_may_be_asked_for_alone() -> None:
    """Layers that share K and V may attend for fewer rows: each to the tokens of its own row."""
    on = spoken(batch=2)
    layer = on.driver.layer
    generator = torch.Generator().manual_seed(9)
    key = torch.randn(2, 1, 3, 16, generator=generator)
    query = torch.randn(2, 2, 3, 16, generator=generator)
    layer.forward = Forward(Kind.VERIFY, layer.columns, 3)
    inputs = AttentionInputs(query, key, key, None, AttentionSpec(0.25))
    whole = layer.attend(inputs)
    last = layer.attend(replace(inputs, query=query[:, :, -1:], new=False))
    torch.testing.assert_close(last, whole[:, :, -1:])


def test_a_borrower_s_batch_operation_leaves_the_owner_as_it_is() -> None:
    """The host memory is shared, what has a batch is not."""
    model = tiny_model("llama")
    base = OasisCache(model, budget=256, block_size=16)
    forward(model, prompt(150, 1), base)
    borrower = OasisCache(model, budget=256, block_size=16)
    borrower.ledger.copy_from(base.ledger)
    held = []
    for old, new in zip(base.offloaded, borrower.offloaded, strict=True):
        held.append(old.history([150])[0])
        new.adopt(*old.history([150])[:2], old.parts.frontier.lengths, old.columns, owner=old)
    borrower.batch_repeat_interleave(3)
    forward(model, prompt(1, 3), borrower)
    for layer, k in zip(base.offloaded, held, strict=True):
        assert layer.parts.store.batch == 1 and torch.equal(layer.history([150])[0], k)


def test_only_a_layer_of_the_same_form_can_be_borrowed() -> None:
    """Another batch would be read and written out of bounds."""
    model = tiny_model("llama")
    base = OasisCache(model, budget=256, block_size=16)
    forward(model, prompt(150, 2), base)
    owner = base.offloaded[0]
    k, v, _ = owner.history([150, 150])
    other = OasisCache(model, budget=256, block_size=16).offloaded[0]
    with pytest.raises(ValueError, match=r"owner: got .*\(2, 2, 16, 16, .* expected \(1, 2,"):
        other.adopt(k[:1], v[:1], owner.parts.frontier.lengths[:1], 150, owner=owner)


def test_what_a_forward_left_is_gone_after_a_batch_operation() -> None:
    """Positions and tokens asked for ahead belong to the sequences of then."""
    on = spoken()
    on.decode(1, "none", 3)
    layer = on.driver.layer
    asked: list[str] = []
    layer.prompts.ahead = SimpleNamespace(clear=lambda: asked.append("clear"))
    on.repeat(2)
    assert layer._rows is None and asked == ["clear"]
