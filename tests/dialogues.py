"""A whole model and its cache in any order of uses, next to Transformers' own cache.

At full budget each forward must give the logits that a `DynamicCache` gives, which goes through the
same operations. Nothing here depends on ties: what is generated is fed to the other cache, and must
be the best token there up to rounding. Serves any engine and device, with graphs or without.
"""

from __future__ import annotations

import copy
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from helpers import assert_close, dense_cache, forward, generate, prompt
from torch import Tensor
from transformers import PreTrainedModel

from oasis_hf import OasisCache

LONGEST = 460
ROWS = 5

WEIGHTS = {
    "say": 3,
    "decode": 6,
    "generate": 3,
    "verify": 3,
    "crop": 2,
    "repeat": 2,
    "select": 2,
    "reorder": 1,
    "reset": 1,
    "fork": 1,
    "load": 1,
}
"""How often each move is made."""


class Dialogue:
    """One model, an `OasisCache` at full budget, and a `DynamicCache`.

    Args:
        model: the model.
        seed: says what is done.
        most: sequences at most.
        rounding: of the comparison of logits, in roundings of the largest.
        **options: of the cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        seed: int,
        most: int = 4,
        rounding: float = 1024,
        **options: Any,
    ) -> None:
        self.model, self.random, self.most = model, random.Random(seed), most
        self.rounding = rounding
        fixed = {"budget": 512, "recent_tokens": 8, "block_size": 16, "max_rows": 8}
        self.options = fixed | options
        self.cache, self.replayed, self.captured = OasisCache(model, **self.options), 0, 0
        self.dense = dense_cache(model)
        self.batch = self.random.randint(1, most)
        self.ids = torch.zeros(self.batch, 0, dtype=torch.long, device=model.device)
        self.played: list[str] = []

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self.cache.get_seq_length()

    def move(self, name: str | None = None) -> None:
        """One use, whatever fits."""
        names = list(WEIGHTS) if self.length else ["say"]
        if self.length > LONGEST - 130:
            names = ["crop", "repeat", "select", "reorder", "reset"]
        if name is None:
            name = self.random.choices(names, [WEIGHTS[x] for x in names])[0]
        self.played.append(name)
        getattr(self, name)()
        held = self.cache.get_seq_length()
        assert held == self.dense.get_seq_length() == self.ids.shape[1]
        assert self.ids.shape[0] == self.batch

    def tokens(self, count: int) -> Tensor:
        """Random ids `[B, count]`."""
        seed = self.random.randrange(2**20)
        return prompt(count, self.batch, seed).to(self.model.device)

    def feed(self, ids: Tensor) -> None:
        """One forward of both."""
        got = forward(self.model, ids, self.cache)
        want = forward(self.model, ids, self.dense)
        assert_close(got, want, self.rounding)
        self.ids = torch.cat([self.ids, ids], 1)

    # ---- moves -----------------------------------------------------------------------------------

    def say(self) -> None:
        """A prompt, or a turn of a few tokens."""
        self.cache.expect(prompt=True)
        self.feed(self.tokens(self.random.choice((2, 9, 31, 64, 130))))

    def decode(self) -> None:
        """Single tokens: enough for a graph to be captured and replayed."""
        for _ in range(self.random.randint(1, 12)):
            self.feed(self.tokens(1))

    def generate(self) -> None:
        """Plain `generate`, behind one more turn that it is given with all that was said."""
        turn = self.tokens(self.random.randint(1, 7))
        whole = torch.cat([self.ids, turn], 1)
        new = generate(self.model, whole, self.cache, self.random.randint(2, 9))
        fed = torch.cat([turn, new[:, :-1]], 1)
        self.ids = torch.cat([self.ids, fed], 1)
        want = forward(self.model, fed, self.dense)[:, turn.shape[1] - 1 :]
        chosen = want.gather(-1, new[..., None])[..., 0]
        bound = self.rounding * torch.finfo(want.dtype).eps * float(want.abs().max())
        assert float((want.amax(-1) - chosen).max()) <= bound

    def verify(self) -> None:
        """Drafts, some of them taken back."""
        self.cache.expect_drafts()
        for _ in range(self.random.randint(1, 4)):
            self.feed(self.tokens(ROWS))
            self._shorten(self.random.randint(0, ROWS))

    def _shorten(self, count: int) -> None:
        self.cache.crop(-count)
        if count:
            self.dense.crop(-count)
            self.ids = self.ids[:, :-count]

    def crop(self) -> None:
        """Back by a few tokens, or by many; something always stays."""
        self._shorten(self.random.choice((1, 3, self.random.randrange(self.length))) % self.length)

    def repeat(self) -> None:
        times = self.random.randint(1, max(1, self.most // self.batch))
        self._both("batch_repeat_interleave", times)
        self._take([row for row in range(self.batch) for _ in range(times)])

    def select(self) -> None:
        rows = [self.random.randrange(self.batch) for _ in range(self.random.randint(1, self.most))]
        self._both("batch_select_indices", torch.tensor(rows, device=self.model.device))
        self._take(rows)

    def reorder(self) -> None:
        rows = [self.random.randrange(self.batch) for _ in range(self.batch)]
        self._both("reorder_cache", torch.tensor(rows, device=self.model.device))
        self._take(rows)

    def _both(self, operation: str, *arguments: Any) -> None:
        for cache in (self.cache, self.dense):
            getattr(cache, operation)(*arguments)

    def _take(self, rows: list[int]) -> None:
        self.ids, self.batch = self.ids[rows], len(rows)

    def reset(self) -> None:
        """Start again, with another batch."""
        self.cache.reset()
        self.dense = dense_cache(self.model)
        self.batch = self.random.randint(1, self.most)
        self.ids = self.ids.new_zeros(self.batch, 0)
        self.say()

    def fork(self) -> None:
        """Go on with a copy; the original goes on being used, and is dropped."""
        self._count()
        original, self.cache = self.cache, self.cache.fork()
        held = copy.deepcopy(self.dense)
        for _ in range(3):
            ids = self.tokens(1)
            got, want = forward(self.model, ids, original), forward(self.model, ids, held)
            assert_close(got, want, self.rounding)

    def load(self) -> None:
        """Go on with what was saved."""
        self._count()
        with tempfile.TemporaryDirectory() as folder:
            self.cache.save(Path(folder) / "cache")
            self.cache = OasisCache.load(Path(folder) / "cache", self.model)

    def _count(self) -> None:
        """Take note of what graphs did for a cache that is given up."""
        if self.cache.graphs is not None:
            summary = self.cache.graphs.summary()
            self.replayed += summary["replayed"]
            self.captured += summary["captured"]

    def finish(self) -> None:
        """Every row's whole history, once more."""
        self._count()
        for ours, theirs in zip(self.cache.offloaded, self.dense.layers, strict=True):
            k, v, _ = ours.history(ours.parts.frontier.lengths.tolist())
            assert_close(k, theirs.keys, self.rounding)
            assert_close(v, theirs.values, self.rounding)
