"""Any order of cache operations, found by hypothesis, against plain lists: see `operations`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from operations import LONGEST, MAX_ROWS, PADDINGS, Operations

pytestmark = pytest.mark.usefixtures("small_slabs")

seeds = st.integers(0, 2**20)
padding = st.sampled_from(PADDINGS)
holding = precondition(lambda self: self.on.length > 0)
room = precondition(lambda self: self.on.length < LONGEST - 130)


class CacheMachine(RuleBasedStateMachine):
    """Hypothesis plays; `on` is played with."""

    block = 16
    index: Any = "keys2bit"
    on: Operations

    @initialize(
        batch=st.integers(1, 3),
        full=st.booleans(),
        padded=st.booleans(),
        on_miss=st.sampled_from(["fetch", "skip"]),
        recent=st.sampled_from([0, 8]),
        head_room=st.sampled_from([1, 1.5, 4]),
        exact=st.booleans(),
    )
    def start(
        self,
        batch: int,
        full: bool,
        padded: bool,
        on_miss: str,
        recent: int,
        head_room: float,
        exact: bool,
    ) -> None:
        self.on = Operations(
            batch,
            full,
            padded,
            block_size=self.block,
            index=self.index,
            on_miss=on_miss,
            head_room=head_room,
            # Rows that are verified in turn must all be recent.
            recent_tokens=max(recent, MAX_ROWS) if exact else recent,
            verification="exact" if exact else "shared",
        )

    # ---- moves -----------------------------------------------------------------------------------

    @room
    @rule(count=st.sampled_from([2, 15, 17, 40, 64, 65, 130]), kind=padding, seed=seeds)
    def prompt(self, count: int, kind: str, seed: int) -> None:
        self.on.prompt(count, kind, seed)

    @room
    @rule(count=st.integers(1, 24), kind=padding, seed=seeds)
    def decode(self, count: int, kind: str, seed: int) -> None:
        self.on.decode(count, kind, seed)

    @room
    @rule(
        rounds=st.integers(1, 6),
        count=st.integers(1, MAX_ROWS),
        rejected=st.integers(0, MAX_ROWS),
        kind=padding,
        seed=seeds,
    )
    def verify(self, rounds: int, count: int, rejected: int, kind: str, seed: int) -> None:
        self.on.verify(rounds, count, rejected, kind, seed)

    @room
    @rule(
        rounds=st.integers(1, 6),
        count=st.integers(1, MAX_ROWS),
        steps=st.booleans(),
        kind=st.sampled_from(["none", "right", "whole rows"]),
        spare=st.integers(-9, 9),
        seed=seeds,
    )
    def verify_each(
        self, rounds: int, count: int, steps: bool, kind: str, spare: int, seed: int
    ) -> None:
        self.on.verify_each(rounds, count, steps, kind, spare, seed)

    @holding
    @rule(share=st.floats(0, 1), near=st.booleans())
    def crop(self, share: float, near: bool) -> None:
        self.on.crop(share, near)

    @holding
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = st.integers(0, self.on.batch - 1)
        self.on.reorder(data.draw(st.lists(rows, min_size=self.on.batch, max_size=self.on.batch)))

    @precondition(lambda self: self.on.length > 0 and self.on.batch < 3)
    @rule(times=st.integers(1, 2))
    def repeat(self, times: int) -> None:
        self.on.repeat(times)

    @holding
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        rows = st.integers(0, self.on.batch - 1)
        self.on.select(data.draw(st.lists(rows, min_size=1, max_size=4)))

    @holding
    @rule(batch=st.integers(1, 3))
    def reset(self, batch: int) -> None:
        self.on.reset(batch)

    @holding
    @rule()
    def save_and_load(self) -> None:
        self.on.save_and_load()

    @holding
    @rule()
    def fork(self) -> None:
        self.on.fork()

    @holding
    @rule()
    def copy(self) -> None:
        self.on.copy()

    @holding
    @room
    @rule(count=st.sampled_from([1, 3, 70]), kind=padding, seed=seeds)
    def break_off(self, count: int, kind: str, seed: int) -> None:
        self.on.break_off(count, kind, seed)

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "on"):
            self.on.check()


@pytest.mark.parametrize("index", ["keys2bit", "minmax"])
@pytest.mark.parametrize("block", [1, 4, 16], ids=lambda n: f"block {n}")
def test_any_order_of_operations(block: int, index: str) -> None:
    machine = type("Machine", (CacheMachine,), {"block": block, "index": index})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=14,
            stateful_step_count=18,
            deadline=None,
            derandomize=True,
            database=None,
            # Shrinking takes minutes; leave Phase.shrink out only here, not when looking for a bug.
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )
