"""Operations of a cache in any order, against plain lists of each sequence's K and V.

Prompts, decode steps, verifications, crops, commits, batch operations, resets, saving, forking,
copying and forwards that break off, on one offloaded layer without a model. After each of them
the cache must hold exactly what the plain lists hold, its tables must agree with each other, and at
full budget its attention must be plain attention. Serves any engine and device.
"""

from __future__ import annotations

import copy
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from helpers import Driver, assert_close, plain_attention, random_qkv
from torch import Tensor

from oasis_hf import OasisCache

LONGEST = 320
MAX_ROWS = 6
FULL_BUDGET = 384
PADDINGS = ("none", "none", "left", "right", "random", "whole rows")


WEIGHTS = {
    "prompt": 3,
    "decode": 5,
    "verify": 2,
    "verify_each": 2,
    "crop": 2,
    "reorder": 1,
    "repeat": 2,
    "select": 2,
    "reset": 1,
    "save_and_load": 1,
    "fork": 1,
    "copy": 1,
    "break_off": 1,
}
"""How often a player makes each move."""


class Operations:
    """One offloaded layer, driven without a model.

    Args:
        batch: sequences to begin with.
        full: whether the budget covers everything.
        padded: whether any token may be padding.
        kv_heads: KV heads; twice as many queries.
        device: where the layer is.
        **options: of the cache.

    Attributes:
        rows: K and V `[H, L, D]` of every sequence, padding left out.
        real: `[B, columns]` bool, which columns were real.
    """

    def __init__(
        self,
        batch: int,
        full: bool,
        padded: bool,
        kv_heads: int = 2,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.full, self.padded, self.batch, self.kv_heads = full, padded, batch, kv_heads
        self.options = options
        chosen = {"sink_tokens": 16, "max_rows": MAX_ROWS, "block_size": 16} | options
        self.driver = Driver(
            heads=2 * kv_heads,
            kv_heads=kv_heads,
            device=device,
            budget=FULL_BUDGET if full else 32,
            **chosen,
        )
        self._forget()

    def _forget(self) -> None:
        empty = torch.zeros(self.kv_heads, 0, 16)
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
        q, k, v = random_qkv(generator, self.batch, count, 2 * self.kv_heads, self.kv_heads)
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

    def prompt(self, count: int, kind: str, seed: int) -> None:
        self.cache.expect(prompt=True)
        self._feed(count, kind, seed)

    def decode(self, count: int, kind: str, seed: int) -> None:
        for step in range(count):
            self._feed(1, kind, seed + step)

    def verify(self, rounds: int, count: int, rejected: int, kind: str, seed: int) -> None:
        self.cache.expect_drafts()
        for number in range(rounds):
            self._feed(count, kind, seed + number)
            taken = min(rejected, count)
            self.cache.crop(-taken)
            self._shorten(taken)

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

    def crop(self, share: float, near: bool) -> None:
        deepest = min(self.length, 4 if near else self.length)
        columns = round(share * deepest)
        self.cache.crop(-columns)
        self._shorten(columns)

    def reorder(self, rows: list[int]) -> None:
        self.cache.reorder_cache(torch.tensor(rows))
        self._take(rows)

    def repeat(self, times: int) -> None:
        self.cache.batch_repeat_interleave(times)
        self._take([row for row in range(self.batch) for _ in range(times)])

    def select(self, rows: list[int]) -> None:
        self.cache.batch_select_indices(torch.tensor(rows))
        self._take(rows)

    def _take(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        self.real, self.batch = self.real[rows], len(rows)

    def reset(self, batch: int) -> None:
        """Forget everything; another batch comes next."""
        self.cache.reset()
        self.batch = batch
        self._forget()

    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache.safetensors"
            self.cache.save(path)
            index = self.cache.oasis_config.index
            options = {} if isinstance(index, str) else {"index": index}
            if self.driver.device == "cpu":
                self.driver.cache = OasisCache.load(path, self.cache.model_config, **options)

    def fork(self) -> None:
        self.driver.cache = self.cache.fork()

    def copy(self) -> None:
        """From here on the copy is used; what it shares with the original would show."""
        original = self.cache
        self.driver.cache = copy.deepcopy(original)
        original.reset()

    def break_off(self, count: int, kind: str, seed: int) -> None:
        """A forward that is undone, as the hook on a model does after an error."""
        checkpoint, rows, real = self.cache.checkpoint(), list(self.rows), self.real
        self._feed(count, kind, seed)
        self.cache.roll_back(checkpoint)
        self.rows, self.real = rows, real

    # ---- what always holds -----------------------------------------------------------------------

    def check(self) -> None:
        """Everything that must hold between two operations."""
        self.check_counts()
        layer = self.driver.layer
        if layer.is_initialized:
            layer.parts.join()
            self.check_shapes()
            self.check_history()
            self.check_tables()
            self.check_index()

    def check_counts(self) -> None:
        layer, ledger = self.driver.layer, self.cache.ledger
        assert self.cache.get_seq_length() == layer.columns == ledger.columns == self.length
        if ledger.real() is not None:
            assert torch.equal(ledger.real().cpu(), self.real)
        if not layer.is_initialized:
            return
        g, lengths, committed = (
            layer.parts.geometry,
            self.real.sum(1),
            layer.parts.frontier.committed.cpu(),
        )
        assert torch.equal(layer.parts.frontier.lengths.cpu(), lengths)
        assert (
            layer.batch_size == self.batch and layer.parts.frontier.lengths.shape == committed.shape
        )
        assert not (committed % g.group).any() and (committed >= 0).all()
        assert (committed <= lengths).all()
        assert (lengths - committed <= layer.parts.tail.places).all()
        assert (
            layer.parts.store.blocks == layer.parts.residency.blocks == layer.parts.index.capacity
        )

    def check_shapes(self) -> None:
        """Nothing has the batch of before, or lies in pieces."""
        layer, heads = self.driver.layer, self.kv_heads
        batched = [
            layer.parts.pool.k,
            layer.parts.pool.v,
            layer.parts.tail.k,
            layer.parts.tail.v,
            *layer.parts.store.slabs,
        ]
        batched += [*layer.parts.residency.tables, *layer.parts.index.arrays.values()]
        for tensor in batched:
            assert tensor.shape[:2] == (self.batch, heads) and tensor.is_contiguous()
        for tensor in (
            layer.parts.frontier.lengths,
            layer.parts.frontier.committed,
            layer.parts.frontier.committed_before,
        ):
            assert tensor.shape == (self.batch,)
        assert layer.parts.store.batch == self.batch

    def check_history(self) -> None:
        """No token is lost."""
        layer = self.driver.layer
        k, v, valid = layer.history(layer.parts.frontier.lengths.tolist())
        k, v = k.cpu(), v.cpu()
        for row, (want_k, want_v) in enumerate(self.rows):
            length = want_k.shape[1]
            assert torch.equal(k[row, :, :length], want_k)
            assert torch.equal(v[row, :, :length], want_v)
            assert not k[row, :, length:].any() and not v[row, :, length:].any()
            if valid is not None:
                assert valid[row].tolist() == [p < length for p in range(k.shape[2])]

    def check_tables(self) -> None:
        """The tables agree with each other, and resident blocks with the lists."""
        layer = self.driver.layer
        residency, size = layer.parts.residency, layer.parts.geometry.block
        slot_of, block_of, ages = (table[..., :-1].cpu().long() for table in residency.tables)
        committed = layer.parts.frontier.committed.cpu()
        resident = block_of >= 0
        assert (slot_of >= 0).sum() == resident.sum()
        slots = torch.arange(block_of.shape[2]).expand_as(block_of)
        assert torch.equal(slot_of.gather(2, block_of.clamp(min=0))[resident], slots[resident])
        assert torch.equal(ages >= 0, resident)
        assert (block_of * size < committed[:, None, None])[resident].all()
        pools = layer.parts.pool.k.cpu(), layer.parts.pool.v.cpu()
        for row, wanted in enumerate(self.rows):
            heads, places = resident[row].nonzero(as_tuple=True)
            blocks = block_of[row, heads, places]
            for pool, want in zip(pools, wanted, strict=True):
                split = want[:, : int(committed[row])].unflatten(1, (-1, size))
                assert torch.equal(pool[row, heads, places], split[heads, blocks])

    def check_index(self) -> None:
        """Every full group has its summary, unless the index has nothing to rank yet."""
        layer = self.driver.layer
        index = layer.parts.index
        if not index.ready:
            return
        for row, (k, _) in enumerate(self.rows):
            done = int(layer.parts.frontier.committed[row])
            if not done:
                continue
            groups = (
                k[None, :, :done].unflatten(2, (-1, layer.parts.geometry.group)).to(layer.device)
            )
            for name, part in index.encode_rows(slice(row, row + 1), groups).items():
                same = index.arrays[name][row : row + 1, :, : part.shape[2]] == part
                # Products of matrices are rounded by the size of the batch, and by the engine.
                assert same.float().mean() > 0.999 if index.learns else same.all(), name


class Player:
    """Plays operations by a seed; needs nothing that a GPU machine may lack.

    Args:
        operations: what is played with.
        seed: says what is done.
        most: sequences at most, decode steps of one move, and rows of a verification.
        prompts: lengths of prompts.
    """

    def __init__(
        self,
        operations: Operations,
        seed: int,
        most: tuple[int, int, int] = (4, 24, MAX_ROWS),
        prompts: tuple[int, ...] = (2, 15, 17, 40, 64, 65, 130),
    ) -> None:
        self.on, self.random = operations, random.Random(seed)
        self.batch, self.steps, self.rows = most
        self.prompts = prompts
        self.played: list[str] = []

    def move(self) -> str:
        """One operation, whatever fits, and everything that must hold after it."""
        draw, on = self.random, self.on
        names = ["prompt", "reset"] if not on.length else list(WEIGHTS)
        if on.length > LONGEST - max(self.prompts):
            names = [x for x in names if x not in ("prompt", "decode", "verify", "verify_each")]
            names = [x for x in names if x != "break_off"]
        name = draw.choices(names, [WEIGHTS[x] for x in names])[0]
        self.played.append(name)
        getattr(on, name)(*self._arguments(name))
        on.check()
        return name

    def _arguments(self, name: str) -> tuple[Any, ...]:
        draw, batch = self.random, self.on.batch
        seed, kind = draw.randrange(2**20), draw.choice(PADDINGS)
        rows = draw.randint(1, self.rows)
        match name:
            case "prompt" | "break_off":
                return draw.choice(self.prompts), kind, seed
            case "decode":
                return draw.randint(1, self.steps), kind, seed
            case "verify":
                return draw.randint(1, 2), rows, draw.randint(0, rows), kind, seed
            case "verify_each":
                kind = draw.choice(("none", "right", "whole rows"))
                return 1, rows, draw.random() < 0.3, kind, draw.randint(-9, 9), seed
            case "crop":
                return draw.random(), draw.random() < 0.5
            case "reorder":
                return ([draw.randrange(batch) for _ in range(batch)],)
            case "repeat":
                return (draw.randint(1, max(1, self.batch // batch)),)
            case "select":
                return ([draw.randrange(batch) for _ in range(draw.randint(1, self.batch))],)
            case "reset":
                return (draw.randint(1, self.batch),)
        return ()
