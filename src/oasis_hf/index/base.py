"""The interface of an index: a compact summary of all keys that ranks blocks unread."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from ..geometry import ceil_div, round_up
from .kernel import IndexKernel
from .scores import check_scores


class Index(ABC):
    """Summaries of all full blocks of one layer, in fast memory.

    A subclass says what to store for a group of keys (`encode`) and how a query ranks blocks
    (`block_logits`); storage, growth, masking, reduction over query rows and the cache's batch
    operations are inherited.

    Attributes:
        name: identifies the index in configs, saved caches and reports.
        estimates_mass: whether `exp(block_logits)` estimates a block's unnormalised attention; only
            then a miss can be judged by its share of the attention.
        coarse: names of the arrays that every step reads whole; None for all of them.
        group_blocks: blocks encoded together.
        block: tokens per block.
        budget_blocks: blocks that will be chosen per head.
        arrays: stored tensors `[B, H, groups + 1, ...]`; the last group is the spill.
        kernels: by name of a backend, kernels that scan the index there. They are a class's own: a
            subclass, which may store something else, names its own.
        learns: whether the index is fitted to a context, once it outgrows the budget.
        learned: what was learned, tensors `[B, ...]`.
        ready: whether groups are indexed; of an index that learns, once it has been fitted.
        watched: whether the next scores are checked, those of an index that is not built in.
    """

    name: ClassVar[str]
    estimates_mass: ClassVar[bool] = False
    coarse: ClassVar[tuple[str, ...] | None] = None
    kernels: ClassVar[Mapping[str, IndexKernel]] = {}
    learns: ClassVar[bool] = False
    watched: bool = False

    def __init__(self, block: int, budget_blocks: int, reduction: str, ops: ModuleType) -> None:
        self.block, self.budget_blocks = block, budget_blocks
        self.reduction, self.ops = reduction, ops
        self.arrays: dict[str, Tensor] = {}
        self.learned: dict[str, Tensor] = {}
        self.ready = not self.learns
        self.capacity = 0

    def kernel(self, backend: str) -> IndexKernel | None:
        """The kernels for a backend, or None: torch. All of them combine rows by the mean."""
        own: Mapping[str, IndexKernel] = vars(type(self)).get("kernels", {})
        return own.get(backend) if self.reduction == "mean" else None

    @classmethod
    def group_tokens(cls, block: int) -> int:
        """Tokens encoded together, a multiple of `block`; they stay in the tail until then."""
        return block

    @abstractmethod
    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        """Summarise full groups: keys `[B, H, n, g, D]` to 4-D or larger `[B, H, n, ...]`."""

    def encode_rows(self, rows: slice, keys: Tensor) -> dict[str, Tensor]:
        """`encode` for some sequences, where it depends on what was learned of them."""
        return self.encode(keys)

    @abstractmethod
    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        """Log-score of every block for every query row.

        Args:
            query: `[B, H, Q, D]` float32, scaled.
            live: `[B, 1, N]` bool, blocks that are indexed, N = `capacity`; what is returned for
                the others is ignored.

        Returns:
            `[B, H, Q, N]` float32; -inf leaves a block out.
        """

    def observe(self, query: Tensor, valid: Tensor | None) -> None:
        """See queries of the context, before an index that learns is fitted.

        Args:
            query: `[B, H, G, T, D]`.
            valid: `[B, T]` bool, False for padding; None if all rows are real.
        """
        return

    def fit(self, rows: slice, keys: Tensor) -> None:
        """Learn from the keys `[B', H, n, D]` of some sequences; they are indexed afterwards."""
        return

    def fitted(self, tokens: int) -> None:
        """Every sequence has been fitted, to `tokens` tokens: groups are indexed from now on."""
        self.ready = True

    def knowledge(self) -> dict[str, Tensor]:
        """What an index that learns has learned so far, for another of its kind: see `know`."""
        return {}

    def know(self, knowledge: Mapping[str, Tensor]) -> None:
        """Take over what another index of this kind learned of the same sequences."""
        return

    def outdated(self, tokens: int) -> bool:
        """Whether an index that learns is to be fitted before it ranks the blocks of `tokens`."""
        return not self.ready

    def ensure(self, blocks: int) -> None:
        """Grow the capacity to at least `blocks` blocks."""
        if blocks <= self.capacity:
            return
        group = self.group_tokens(self.block) // self.block
        capacity = round_up(blocks, group)
        grown = {
            name: array.new_zeros(*array.shape[:2], capacity // group + 1, *array.shape[3:])
            for name, array in self.arrays.items()
        }
        for name, array in self.arrays.items():
            grown[name][:, :, : self.capacity // group] = array[:, :, :-1]
        self.arrays, self.capacity = grown, capacity

    def bytes_for(self, blocks: int) -> int:
        """Bytes of arrays with a capacity of at least `blocks` blocks."""
        groups = ceil_div(blocks * self.block, self.group_tokens(self.block))
        return sum((groups + 1) * array[:, :, :1].nbytes for array in self.arrays.values())

    def allocate(self, batch: int, heads: int, example: Tensor) -> None:
        """Create the arrays for keys like `example` `[..., D]`."""
        group = self.group_tokens(self.block)
        groups = self.capacity * self.block // group
        zeros = example.new_zeros(1, 1, 1, group, example.shape[-1])
        for name, part in self.encode(zeros).items():
            self.arrays[name] = part.new_zeros(batch, heads, groups + 1, *part.shape[3:])

    def write(self, group: Tensor, keys: Tensor, keep: Tensor) -> None:
        """Index one full group per sequence: group `[B]`, keys `[B, H, g, D]`, keep `[B]`."""
        for name, part in self.encode(keys[:, :, None]).items():
            table = self.arrays[name]
            target = torch.where(keep, group, table.shape[2] - 1)[:, None, None]
            index = target.expand(-1, table.shape[1], -1)
            self.ops.scatter_blocks(table.flatten(3), index, part.flatten(3))

    def write_range(self, rows: slice, first: int, keys: Tensor) -> None:
        """Index consecutive groups from `first` of some sequences: keys `[B', H, n, g, D]`."""
        for name, part in self.encode_rows(rows, keys).items():
            self.arrays[name][rows, :, first : first + part.shape[2]] = part

    def score(self, query: Tensor, committed: Tensor, rest: Tensor) -> Tensor:
        """One score per block and KV head.

        Args:
            query: `[B, H, Q, D]` float32, scaled.
            committed: `[B]` blocks that are indexed.
            rest: `[B, H, Q]` log of the attention given to the tail; -inf for rows of padding.

        Returns:
            `[B, H, N]` float32, -inf for blocks that are not indexed or left out.
        """
        number = torch.arange(self.capacity, device=query.device)
        live = (number[None] < committed[:, None])[:, None]
        # A real row sees at least itself in the tail.
        real = rest > float("-inf")
        rows = torch.where(real[..., None], query, 0.0)
        logits = self.block_logits(rows, live)
        if self.watched:
            check_scores(type(self).__name__, logits, rows, live)
            self.watched = False
        return self.ops.reduce_rows(
            logits, live, rest if self.estimates_mass else None, self.reduction, real
        )

    def scan_bytes(self, tokens: int) -> int:
        """Bytes that a step behind `tokens` tokens of one sequence reads, whatever it chooses."""
        groups = ceil_div(tokens, self.group_tokens(self.block))
        names = self.arrays if self.coarse is None else self.coarse
        return groups * sum(self.arrays[name][:1, :, :1].nbytes for name in names)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(x.nbytes for x in (*self.arrays.values(), *self.learned.values()))

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a batch operation."""
        self.arrays = {name: fn(array) for name, array in self.arrays.items()}
        self.learned = {name: fn(array) for name, array in self.learned.items()}
