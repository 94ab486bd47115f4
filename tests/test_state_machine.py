"""Any order of cache operations, against a plain list of each sequence's K and V.

Hypothesis plays prompts, decode steps, verifications, crops, batch operations, saving, forking and
forwards that break off. After each move the cache must hold exactly what the plain lists hold, its
tables must agree with each other, and at full budget its attention must be plain attention.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Driver, assert_close, plain_attention, random_qkv
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
from torch import Tensor

from oasis_hf import OasisCache

pytestmark = pytest.mark.usefixtures("small_slabs")

LONGEST = 320
MAX_ROWS = 6
FULL_BUDGET = 384

seeds = st.integers(0, 2**20)
padding = st.sampled_from(["none", "none", "left", "right", "random", "whole rows"])
holding = precondition(lambda self: self.length > 0)
room = precondition(lambda self: self.length < LONGEST - 130)


class CacheMachine(RuleBasedStateMachine):
    """One offloaded layer, driven without a model.

    Attributes:
        rows: K and V `[H, L, D]` of every sequence, padding left out.
        real: `[B, columns]` bool, which columns were real.
    """

    block = 16
    index: Any = "keys2bit"

    @initialize(
        batch=st.integers(1, 3),
        full=st.booleans(),
        padded=st.booleans(),
        on_miss=st.sampled_from(["fetch", "skip"]),
        recent=st.sampled_from([0, 8]),
        head_room=st.sampled_from([1, 1.5, 4]),
    )
    def start(
        self, batch: int, full: bool, padded: bool, on_miss: str, recent: int, head_room: float
    ) -> None:
        self.full, self.padded, self.batch = full, padded, batch
        self.driver = Driver(
            budget=FULL_BUDGET if full else 32,
            block_size=self.block,
            index=self.index,
            on_miss=on_miss,
            head_room=head_room,
            recent_tokens=recent,
            sink_tokens=16,
            max_rows=MAX_ROWS,
        )
        self._forget()

    def _forget(self) -> None:
        empty = torch.zeros(2, 0, 16)
        self.rows = [(empty, empty)] * self.batch
        self.real = torch.zeros(self.batch, 0, dtype=torch.bool)

    @property
    def cache(self) -> OasisCache:
        return self.driver.cache

    @property
    def length(self) -> int:
        """Columns so far."""
        return self.real.shape[1]

    def _mask(self, kind: str, count: int, generator: torch.Generator) -> Tensor | None:
        if kind == "none" or not self.padded:
            return None
        mask = torch.ones(self.batch, count, dtype=torch.bool)
        for row in range(self.batch):
            pads = int(torch.randint(0, count + 1, (), generator=generator))
            if kind == "left":
                mask[row, :pads] = False
            elif kind == "right":
                mask[row, count - pads :] = False
            elif kind == "random":
                mask[row] = torch.rand(count, generator=generator) < 0.7
            elif kind == "whole rows":
                mask[row] = pads % 2 == 0
        return mask

    def _feed(self, count: int, kind: str, seed: int) -> None:
        """Feed random tokens, remember them, and compare the attention."""
        generator = torch.Generator().manual_seed(seed)
        q, k, v = random_qkv(generator, self.batch, count)
        mask = self._mask(kind, count, generator)
        self.driver.seen = self.real
        (out,) = self.driver.feed(q, k, v, mask)
        real = torch.ones(self.batch, count, dtype=torch.bool) if mask is None else mask
        self.real = torch.cat([self.real, real], 1)
        for row, keep in enumerate(real):
            old_k, old_v = self.rows[row]
            new = (torch.cat([old_k, k[row][:, keep]], 1), torch.cat([old_v, v[row][:, keep]], 1))
            self.rows[row] = new
            if self.full and keep.any():
                assert_close(out[row][:, keep], plain_attention(q[row][:, keep], *new))
            assert torch.isfinite(out).all()

    def _shorten(self, columns: int) -> None:
        removed = self.real[:, self.length - columns :].sum(1).tolist()
        self.rows = [
            (k[:, : k.shape[1] - n], v[:, : v.shape[1] - n])
            for (k, v), n in zip(self.rows, removed, strict=True)
        ]
        self.real = self.real[:, : self.length - columns]

    # ---- moves -----------------------------------------------------------------------------------

    @room
    @rule(count=st.sampled_from([2, 15, 17, 40, 64, 65, 130]), kind=padding, seed=seeds)
    def prompt(self, count: int, kind: str, seed: int) -> None:
        self.cache.expect(prompt=True)
        self._feed(count, kind, seed)

    @room
    @rule(count=st.integers(1, 24), kind=padding, seed=seeds)
    def decode(self, count: int, kind: str, seed: int) -> None:
        for step in range(count):
            self._feed(1, kind, seed + step)

    @room
    @rule(
        rounds=st.integers(1, 6),
        count=st.integers(1, MAX_ROWS),
        rejected=st.integers(0, MAX_ROWS),
        kind=padding,
        seed=seeds,
    )
    def verify(self, rounds: int, count: int, rejected: int, kind: str, seed: int) -> None:
        self.cache.expect_drafts()
        for number in range(rounds):
            self._feed(count, kind, seed + number)
            taken = min(rejected, count)
            self.cache.crop(-taken)
            self._shorten(taken)

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
        """Every sequence keeps its own number of tokens, fed in one forward or in several."""
        self.cache.expect_drafts()
        for number in range(rounds):
            start = self.length
            for step in range(count if steps else 1):
                self._feed(1 if steps else count, "none" if steps else kind, seed + number + step)
            offered = self.real[:, start:].sum(1)
            generator = torch.Generator().manual_seed(seed + number)
            kept = (torch.rand(self.batch, generator=generator) * (offered + 1)).long()
            # No first token may leave on the left.
            first = torch.where(self.real.any(1), self.real.int().argmax(1), start)
            least = int((start + kept - first).max().clamp(min=start))
            columns = min(max(least, start + int(kept.max()) + spare), self.length)
            self.cache.commit(count, kept, offered, columns if spare else None)
            columns = columns if spare else start + int(kept.max())
            self._keep_first(start, kept, offered, columns)

    def _keep_first(self, start: int, kept: Tensor, offered: Tensor, columns: int) -> None:
        """What `commit` means, one sequence after the other."""
        real = torch.zeros(self.batch, columns, dtype=torch.bool)
        for row, (stays, given) in enumerate(zip(kept.tolist(), offered.tolist(), strict=True)):
            held = self.real[row, : start + stays][-columns:]
            real[row, columns - held.shape[0] :] = held
            k, v = self.rows[row]
            end = k.shape[1] - (given - stays)
            self.rows[row] = (k[:, :end], v[:, :end])
        self.real = real

    @holding
    @rule(share=st.floats(0, 1), near=st.booleans())
    def crop(self, share: float, near: bool) -> None:
        deepest = min(self.length, 4 if near else self.length)
        columns = round(share * deepest)
        self.cache.crop(-columns)
        self._shorten(columns)

    @holding
    @rule(seed=seeds)
    def reorder(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._take(torch.randint(0, self.batch, (self.batch,), generator=generator), "reorder")

    @precondition(lambda self: self.length > 0 and self.batch == 1)
    @rule()
    def repeat(self) -> None:
        self._take(torch.tensor([0, 0]), "repeat")

    @holding
    @rule(seed=seeds)
    def select(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        count = int(torch.randint(1, self.batch + 1, (), generator=generator))
        self._take(torch.randperm(self.batch, generator=generator)[:count], "select")

    def _take(self, rows: Tensor, how: str) -> None:
        if how == "repeat":
            self.cache.batch_repeat_interleave(2)
        elif how == "reorder":
            self.cache.reorder_cache(rows)
        else:
            self.cache.batch_select_indices(rows)
        self.rows = [self.rows[row] for row in rows.tolist()]
        self.real, self.batch = self.real[rows], len(rows)

    @holding
    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self._forget()

    @holding
    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache.safetensors"
            self.cache.save(path)
            options = {} if isinstance(self.index, str) else {"index": self.index}
            self.driver.cache = OasisCache.load(path, self.cache.model_config, **options)

    @holding
    @rule()
    def fork(self) -> None:
        self.driver.cache = self.cache.fork()

    @holding
    @room
    @rule(count=st.sampled_from([1, 3, 70]), kind=padding, seed=seeds)
    def break_off(self, count: int, kind: str, seed: int) -> None:
        """A forward that is undone, as the hook on a model does after an error."""
        checkpoint, rows, real = self.cache.checkpoint(), list(self.rows), self.real
        self._feed(count, kind, seed)
        self.cache.roll_back(checkpoint)
        self.rows, self.real = rows, real

    # ---- what always holds -----------------------------------------------------------------------

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "driver"):
            return
        layer, ledger = self.driver.layer, self.cache.ledger
        assert self.cache.get_seq_length() == layer.columns == ledger.columns == self.length
        if ledger.real() is not None:
            assert torch.equal(ledger.real(), self.real)
        if not layer.is_initialized:
            return
        g, lengths = layer.geometry, self.real.sum(1)
        assert torch.equal(layer.lengths, lengths)
        assert layer.batch_size == self.batch and layer.lengths.shape == layer.committed.shape
        assert not (layer.committed % g.group).any() and (layer.committed >= 0).all()
        assert (layer.committed <= lengths).all()
        assert (lengths - layer.committed <= layer.tail.places).all()
        assert layer.store.blocks == layer.residency.blocks == layer.index.capacity

    @invariant()
    def nothing_is_lost(self) -> None:
        layer = getattr(self, "driver", None) and self.driver.layer
        if not layer or not layer.is_initialized:
            return
        k, v, valid = layer.history(layer.lengths.tolist())
        for row, (want_k, want_v) in enumerate(self.rows):
            length = want_k.shape[1]
            assert torch.equal(k[row, :, :length], want_k)
            assert torch.equal(v[row, :, :length], want_v)
            assert not k[row, :, length:].any() and not v[row, :, length:].any()
            if valid is not None:
                assert valid[row].tolist() == [p < length for p in range(k.shape[2])]

    @invariant()
    def tables_agree(self) -> None:
        layer = getattr(self, "driver", None) and self.driver.layer
        if not layer or not layer.is_initialized:
            return
        residency, size = layer.residency, layer.geometry.block
        slot_of = residency.slot_of_block[..., :-1].long()
        block_of = residency.block_of_slot[..., :-1].long()
        resident = block_of >= 0
        assert (slot_of >= 0).sum() == resident.sum()
        slots = torch.arange(block_of.shape[2]).expand_as(block_of)
        assert torch.equal(slot_of.gather(2, block_of.clamp(min=0))[resident], slots[resident])
        assert torch.equal(residency.last_selected[..., :-1] >= 0, resident)
        assert (block_of * size < layer.committed[:, None, None])[resident].all()
        for row, (want_k, want_v) in enumerate(self.rows):
            heads, places = resident[row].nonzero(as_tuple=True)
            blocks = block_of[row, heads, places]
            done = int(layer.committed[row])
            for pool, want in ((layer.pool.k, want_k), (layer.pool.v, want_v)):
                split = want[:, :done].unflatten(1, (-1, size))
                assert torch.equal(pool[row, heads, places], split[heads, blocks])

    @invariant()
    def index_is_up_to_date(self) -> None:
        layer = getattr(self, "driver", None) and self.driver.layer
        if not layer or not layer.is_initialized:
            return
        for row, (k, _) in enumerate(self.rows):
            done = int(layer.committed[row])
            if not done:
                continue
            groups = k[None, :, :done].unflatten(2, (-1, layer.geometry.group))
            for name, part in layer.index.encode(groups).items():
                stored = layer.index.arrays[name][row : row + 1, :, : part.shape[2]]
                assert torch.equal(stored, part), name


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
