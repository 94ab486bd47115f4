"""What a backend offers: the six operations of a decode step, each under one name and signature.

A step of one layer is the same order of operations with every backend; the library writes it once.

1. `open_step`: which groups of tokens leave the tail, and where the new rows go;
2. `append`: those groups to the store, the pool and the index, then the new rows into the tail;
3. `given`: block scores that an index computed in torch, as the backend's `Scores` (an index with
   kernels of its own makes `Scores` itself);
4. `plan`: choose the best blocks, compare them with the resident ones, list the fetches;
5. `fetch`: copy listed blocks from the store into the pool;
6. `attend`: attention over the chosen blocks and the tail.

None waits for the device, and none has a shape that depends on data, so a step can be captured in a
CUDA graph. `reference` is torch and says what each means; `triton` is kernels. What is done inside
an operation is a backend's own affair.

Letters: B sequences, H KV heads, G query heads per KV head, T rows of the step, Q = G x T, N blocks
of capacity, S resident slots, K blocks of budget, b tokens per block, R places of the tail, D head
dimension. Tables end in a spare entry, the spill, which takes masked-out writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

BACKENDS = ("reference", "triton")
NOW, LATER = 0, 1
"""Lists of a plan: fetched before attention, and after it, for the next step."""
WRITTEN = "written"
"""Form of an index whose groups were written before `append`, or are not to be written."""
SUMS = ("wanted", "hits", "now", "later", "turnover", "filled", "steps")
"""What plans count: blocks over all sequences and heads, and steps. See `Parts.sums`."""


@dataclass(frozen=True)
class AttentionSpec:
    """What the attention of a layer is, besides its tensors.

    Attributes:
        scaling: factor of the logits.
    """

    scaling: float


@dataclass(frozen=True)
class Queries:
    """What a step attends for.

    Attributes:
        query: `[B, H, G, T, Dk]`.
        positions: `[B, T]` int64, contiguous; -1 for padding.
        spec: what the attention is.
    """

    query: Tensor
    positions: Tensor
    spec: AttentionSpec


@dataclass(frozen=True)
class Rules:
    """Sizes and rules of a layer that no step changes, in tokens.

    Attributes:
        block: b.
        group: tokens that leave the tail together, a multiple of the block.
        recent: newest tokens that no group takes with it.
        flushes: groups that may leave the tail in one step.
        sinks: first blocks that are always chosen.
    """

    block: int
    group: int
    recent: int
    flushes: int
    sinks: int


@dataclass(frozen=True)
class Choice:
    """What a plan may choose.

    Attributes:
        count: blocks per head.
        now_above: score above which a missing block is fetched before attention: inf never, -inf
            always.
        later: blocks per head that are fetched after it, at most.
        fill: whether this is the first fill of the pool after a prompt, to which nothing attends.
        ahead: whether this is for the next step, and nothing attends to it either.
    """

    count: int
    now_above: float
    later: int
    fill: bool = False
    ahead: bool = False


@dataclass(frozen=True)
class Opened:
    """An open step.

    Attributes:
        positions: `[B, T]` int64 of the new rows, -1 for padding: such a row sees nothing.
        moved: `[B]` int32 groups that leave the tail.
    """

    positions: Tensor
    moved: Tensor


@dataclass(frozen=True)
class Scores:
    """Scores of candidate blocks, and the sums that normalise them.

    Attributes:
        logits: `[B * H, Q, C]` float32, log of a block's unnormalised attention, or a score where
            `ready`.
        partial: `[B * H, programs, Q, 2]` float32, (maximum, sum of exp) over parts of all there
            is to attend to; None where `ready`.
        positions: `[B, T]` int64 of the rows, -1 for padding, which has no say.
        chosen: `[B * H, C / per_group]` int32 groups of the candidates; None: all blocks in order.
        per_group: blocks per group.
        ready: whether `logits` are scores `[B * H, 1, C]`, larger for better blocks.
    """

    logits: Tensor
    partial: Tensor | None
    positions: Tensor
    chosen: Tensor | None = None
    per_group: int = 1
    ready: bool = False


class Pair(Protocol):
    """K and V: the tail's ring `[B, H, R + 1, D]`, or the pool `[B, H, S + 1, b, D]`."""

    @property
    def k(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...


class Tables(Protocol):
    """Which blocks are resident.

    Attributes:
        slot_of_block: `[B, H, N + 1]` int32, -1 where not resident.
        block_of_slot: `[B, H, S + 1]` int32, -1 where free.
        last_selected: `[B, H, S + 1]` int32 time of the last selection, -1 where free.
        clock: `[1]` int32, time of the current plan.
    """

    slot_of_block: Tensor
    block_of_slot: Tensor
    last_selected: Tensor
    clock: Tensor


class Lengths(Protocol):
    """How far each sequence has come: `[B]` int64 each.

    Attributes:
        lengths: tokens.
        committed: of these, tokens that left the tail.
    """

    lengths: Tensor
    committed: Tensor


class Store(Protocol):
    """The full K and V, in host memory: slabs `[B, H, size + 1, b * (Dk + Dv)]`.

    Attributes:
        table: `[n]` int64 addresses of the slabs on the device; None where it cannot reach them.
    """

    table: Tensor | None

    @property
    def slab_blocks(self) -> int:
        """Blocks of every slab, its spill block aside."""

    def write(self, blocks: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> None:
        """Write blocks `[B, m]` of sequences `keep` `[B]`: k `[B, H, m, b, Dk]`, v likewise."""

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks `[B, H, m]`: k `[B, H, m, b, Dk]` and v; unspecified for those below 0."""


class Index(Protocol):
    """Summaries of the groups that left the tail.

    Attributes:
        arrays: `[B, H, groups + 1, ...]` each, by name.
    """

    arrays: dict[str, Tensor]

    def write(self, group: Tensor, keys: Tensor, keep: Tensor) -> None:
        """Summarise one group `[B]` of sequences `keep` `[B]`: keys `[B, H, group, D]`."""


class Parts(Protocol):
    """What a step of one layer reads and writes."""

    @property
    def frontier(self) -> Lengths: ...
    @property
    def tail(self) -> Pair: ...
    @property
    def pool(self) -> Pair: ...
    @property
    def residency(self) -> Tables: ...
    @property
    def store(self) -> Store: ...
    @property
    def index(self) -> Index: ...
    @property
    def rules(self) -> Rules: ...
    @property
    def sums(self) -> Tensor:
        """`[7]` int64, which plans add to: see `SUMS`."""


class Backend(Protocol):
    """The operations of a backend; each is a function of its module."""

    def new_plan(self, pairs: int, count: int, device: Any) -> Any:
        """Memory of a plan of `count` blocks for each of `pairs` = B x H."""

    def open_step(self, parts: Parts, plan: Any, rows: int, valid: Tensor | None) -> Opened:
        """Open a step of `rows` rows: lengths and committed move on, and the clock by one.

        Args:
            valid: `[B, T]` bool, False for padding; None if all rows are real.
        """

    def append(
        self,
        parts: Parts,
        opened: Opened,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        form: str | None,
    ) -> None:
        """Move groups out of the tail, then write rows: key `[B, H, T, Dk]`, value likewise.

        Args:
            form: how the index is written by the backend itself (one of its `FORMS`); None if
                `Index.write` does it, `WRITTEN` if it is left alone.
        """

    def given(self, score: Tensor, positions: Tensor) -> Scores:
        """Ready scores `[B, H, C]` of the first C blocks, -inf for those that may not be chosen."""

    def plan(self, parts: Parts, scores: Scores, plan: Any, choice: Choice) -> None:
        """Choose, evict the least recently chosen, list the fetches; sums and tables change.

        At the time of the clock: blocks that are chosen at the same time do not evict each other.

        Sinks come first; of equal scores the later block. A sequence whose rows are all padding
        chooses nothing, and fills with any blocks.
        """

    def again(self, parts: Parts, plan: Any) -> None:
        """Before a further plan of the same step: the clock moves on, and the lists are empty."""

    def fetch(self, parts: Parts, plan: Any, which: int) -> Sequence[Tensor]:
        """Copy the blocks of a list, `NOW` or `LATER`; returns the device memory that it reads."""

    def attend(self, parts: Parts, plan: Any, queries: Queries) -> Tensor:
        """Attention of query rows over the blocks of a plan and the tail: `[B, H, G, T, Dv]`."""


def available(name: str) -> bool:
    """Whether a backend's requirements are installed; imports nothing."""
    return name == "reference" or (name == "triton" and find_spec("triton") is not None)


def backend(name: str) -> ModuleType:
    """The module of a backend. Backends never stand in for each other.

    Raises:
        ValueError: unknown name.
        ImportError: its requirements are not installed.
    """
    if name not in BACKENDS:
        raise ValueError(f"kernel backend: got {name!r}, expected one of {', '.join(BACKENDS)}")
    return import_module(f"{__package__}.{name}")
