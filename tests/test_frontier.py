"""How far sequences have come, alone: no cache, no layer, no other part."""

from __future__ import annotations

import pytest
import torch

from oasis_hf.storage.frontier import Frontier

CPU = torch.device("cpu")
GROUP, RECENT = 16, 8


def frontier(lengths: list[int], committed: list[int]) -> Frontier:
    """After a prompt that left the sequences there."""
    made = Frontier(len(lengths), CPU)
    made.lengths.copy_(torch.tensor(lengths))
    made.committed.copy_(torch.tensor(committed))
    made.columns = max(lengths)
    made.filled(list(lengths), list(committed))
    return made


def step(ends: Frontier, rows: int) -> None:
    """A step of so many real rows, as a backend takes it."""
    moved = (ends.lengths - ends.committed - RECENT).clamp(min=0) // GROUP
    ends.committed += moved * GROUP
    ends.lengths += rows
    ends.columns += rows
    ends.stepped(rows, RECENT)


def test_the_host_s_numbers_follow_the_device_s() -> None:
    ends = frontier([70, 50], [48, 32])
    assert ends.settled() == ([70, 50], [48, 32])
    step(ends, 3)
    assert ends.settled() == ([73, 53], [48, 32])


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_rows_of_the_last_step_are_certainly_in_the_tail(rows: int) -> None:
    ends = frontier([70, 50], [48, 32])
    for _ in range(9):
        step(ends, rows)
        assert rows <= ends.fresh <= RECENT + rows
        assert bool((ends.lengths - ends.committed >= ends.fresh).all())


def test_taking_back_fresh_columns_touches_no_store() -> None:
    ends = frontier([70, 50], [48, 32])
    step(ends, 4)
    assert not ends.crop(3, 3)
    assert (ends.columns, ends.fresh, ends.settled()[0]) == (71, 1, [71, 51])
    assert ends.crop(2, 2), "one of these may have left the tail"
    assert (ends.columns, ends.fresh) == (69, 0)


def test_sequences_may_give_back_numbers_of_their_own() -> None:
    """Of four rows the first keeps one and the second three; the columns are set anew."""
    ends = frontier([70, 50], [48, 32])
    step(ends, 4)
    assert not ends.commit(4, torch.tensor([3, 1]), 73)
    assert ends.settled()[0] == [71, 53]
    assert (ends.columns, ends.fresh) == (73, 0)


def test_groups_that_left_after_rejected_drafts_come_back() -> None:
    """And stay out where they would have left a step later anyway."""
    ends = frontier([71, 71], [48, 48])
    ends.committed_before.copy_(ends.committed)
    ends.lengths += torch.tensor([9, 9])
    ends.committed += 16
    ends.stepped_in_turn(9)
    assert ends.in_turn and not ends.crop(8, torch.tensor([8, 0]))
    ends.uncommit(RECENT, GROUP)
    assert ends.settled() == ([72, 80], [48, 64])


@pytest.mark.parametrize("lengths", [None, [12, 10]])
def test_roll_back_returns_to_given_columns(lengths: list[int] | None) -> None:
    ends = frontier([70, 50], [48, 32])
    step(ends, 2)
    ends.roll_back(12, None if lengths is None else torch.tensor(lengths))
    assert ends.settled()[0] == (lengths or [12, 12])
    assert (ends.columns, ends.fresh, ends.in_turn) == (12, 0, False)


def test_batch_operations_move_every_row() -> None:
    ends = frontier([70, 50], [48, 32])
    ends.map_batch(lambda held: held[torch.tensor([1, 1, 0])])
    assert ends.settled() == ([50, 50, 70], [32, 32, 48])
    assert [len(held) for held in ends.tensors] == [3, 3, 3]
