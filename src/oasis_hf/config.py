"""The frozen, validated choices of an `OasisCache`."""

import math
from dataclasses import dataclass
from typing import Any

from .geometry import budgeted_blocks, capped_blocks
from .lookahead import LRU, Predictor, predictor
from .misses import MissPolicy, policy_of

INDEX_NAMES = ("keys2bit", "minmax", "minmax8", "pca", "mean", "streaming", "oracle")
BACKENDS = ("auto", "reference", "triton")
REDUCTIONS = ("mean", "max")
VERIFICATIONS = ("shared", "exact")
DEFAULT_CAP = 0.05
"""Share of the budget that `fetch_cap="auto"` admits per head and step where it knows no link: the
paper's choice."""
BLOCK, FINEST_BLOCK = 16, 4
"""Tokens per block: the usual, and the fewest that `block_size="auto"` takes."""
FINE_INDEXES = ("keys2bit", "pca")
"""Indexes that rank single tokens, of the same size with finer blocks."""
FINE_BLOCKS = 64
"""Blocks of budget that `block_size="auto"` makes at least, where finer blocks cost no index."""


class OasisConfigError(ValueError):
    """An argument of `OasisCache` that cannot be used; the message names it and the way out."""


@dataclass(frozen=True)
class OasisConfig:
    """Choices of a cache. All token counts are per KV head.

    Attributes:
        budget: tokens attended to besides the tail, rounded up to whole blocks (`budget_tokens`);
            None for all of them: exact attention. Whatever it is, memory and time follow the
            context where that is shorter.
        block_size: tokens per block, the unit of choosing and moving; a power of two. "auto" is 16,
            or where the index is "keys2bit" or "pca" and on_miss "fetch", as fine as makes 64
            blocks of the budget, 4 at the least: finer blocks hold more of the attention at the
            same budget, of such an index and slots of the same size; they take longer to rank and
            to move.
        head_room: resident slots per block of budget, at least 1. Slots beyond the budget only
            cache: they make a block that comes back free of a transfer.
        sink_tokens: first tokens of the context, always chosen (rounded up to blocks).
        recent_tokens: newest tokens that always stay in the tail.
        index: which summary of the keys ranks the blocks: a name or an `Index` subclass.
        reduction: how the query rows of a KV head are combined: "mean" of their softmax, or
            "max" of their logits (the paper's).
        on_miss: a wanted block that is not resident is skipped this step ("skip"), fetched before
            attention ("fetch"), or fetched if its estimated share of attention exceeds a number;
            or what a `MissPolicy` of yours says for each layer.
        fetch_cap: blocks fetched in the background per head and step, as a share of the budget, at
            least one; 0 for none; None for no limit; "auto" for what the link to host memory brings
            during one step (see `oasis_hf.storage.link`), which depends on the model, the batch and
            the length. "auto" is 0.05 without CUDA kernels, and in a cache of a config alone. With
            on_miss="fetch" it counts for a predictor alone.
        lookahead: what is fetched in the background, for the next step: the best of the blocks that
            this step missed ("lru"), or those that a predictor asks for: "last", "rows", or a
            `Predictor` of yours. A predictor scores all blocks once more in every step.
        store: where the full K and V are kept: "pinned" (host memory), or a `BlockStore` subclass.
        dense_layers: layers that keep all K and V on the device and attend to everything.
        verification: the rows of a verification of drafts share one choice of blocks ("shared"), or
            each makes its own as plain decoding would ("exact"): slower, and with on_miss="fetch"
            assisted decoding gives the tokens of plain decoding at any budget.
        max_rows: most query rows of one sparse step (a verification of drafts).
        prefill_chunk_size: tokens per piece of a long prompt, or None; needs the cache to have been
            built from the model, not from its config.
        backend: "reference" (torch), "triton", or "auto".
        graphs: replay whole decode steps as CUDA graphs, where that is possible.
        compile: fuse the model's own elementwise work in these graphs with `torch.compile`; takes
            tens of seconds once, and rounds differently.
    """

    budget: int | None = 2048
    block_size: int | str = "auto"
    head_room: float = 2.0
    sink_tokens: int = 16
    recent_tokens: int = 32
    index: Any = "keys2bit"
    reduction: str = "mean"
    on_miss: str | float | MissPolicy = "fetch"
    fetch_cap: str | float | None = "auto"
    lookahead: Any = LRU
    store: Any = "pinned"
    dense_layers: tuple[int, ...] = ()
    verification: str = "shared"
    max_rows: int = 32
    prefill_chunk_size: int | None = None
    backend: str = "auto"
    graphs: bool = True
    compile: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dense_layers, list | tuple | range | set | frozenset):
            raise OasisConfigError(
                f"dense_layers: got {self.dense_layers!r}, expected layer numbers like (0, 1)"
            )
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        self._check_counts()
        self._check_choices()

    def _check_counts(self) -> None:
        for name in ("budget", "sink_tokens", "recent_tokens", "max_rows"):
            value = getattr(self, name)
            if name == "budget" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                every = ", or None for all" if name == "budget" else ""
                raise OasisConfigError(
                    f"{name}: got {value!r}, expected a whole number of tokens{every}"
                )
        given = self.block_size
        number = isinstance(given, int) and not isinstance(given, bool)
        power = isinstance(given, int) and given >= 1 and not given & (given - 1)
        if given != "auto" and not (number and power):
            raise OasisConfigError(
                f"block_size: got {given!r}, expected 'auto' or a power of two such as 16; smaller "
                "blocks choose finer and transfer less efficiently"
            )
        if self.budget is not None and self.budget < 1:
            raise OasisConfigError(
                f"budget: got {self.budget}, expected at least 1 token (it is rounded up to whole "
                "blocks), or None for all of them"
            )
        most = self.budget_tokens
        if self.sink_tokens < 0 or (most is not None and self.sink_tokens > most):
            raise OasisConfigError(
                f"sink_tokens: got {self.sink_tokens}, expected 0 to budget "
                f"({'all' if most is None else most})"
            )
        if self.recent_tokens < 0:
            raise OasisConfigError(f"recent_tokens: got {self.recent_tokens}, expected 0 or more")
        if self.max_rows < 1:
            raise OasisConfigError(f"max_rows: got {self.max_rows}, expected 1 or more")
        chunk = self.prefill_chunk_size
        if chunk is not None and (
            isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1
        ):
            raise OasisConfigError(
                f"prefill_chunk_size: got {chunk!r}, expected a positive number of tokens or None"
            )
        if not (isinstance(self.head_room, int | float) and 1 <= self.head_room < math.inf):
            raise OasisConfigError(
                f"head_room: got {self.head_room!r}, expected a number of at least 1 (slots per "
                "block of budget)"
            )

    def _check_choices(self) -> None:
        if isinstance(self.index, str) and self.index not in INDEX_NAMES:
            raise OasisConfigError(
                f"index: got {self.index!r}, expected one of {', '.join(INDEX_NAMES)}, or a "
                "subclass of oasis_hf.Index"
            )
        for name, choices in (
            ("backend", BACKENDS),
            ("reduction", REDUCTIONS),
            ("verification", VERIFICATIONS),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise OasisConfigError(
                    f"{name}: got {value!r}, expected one of {', '.join(choices)}"
                )
        miss = self.on_miss
        if isinstance(miss, str):
            if miss not in ("skip", "fetch"):
                raise OasisConfigError(
                    f"on_miss: got {miss!r}, expected 'skip', 'fetch' or a share of attention "
                    "between 0 and 1 such as 0.01, or a MissPolicy"
                )
        elif isinstance(miss, MissPolicy):
            pass
        elif isinstance(miss, bool) or not isinstance(miss, int | float) or not 0 < miss < 1:
            raise OasisConfigError(
                f"on_miss: got {miss!r}, expected 'skip', 'fetch' or a share of attention between "
                "0 and 1 such as 0.01, or a MissPolicy"
            )
        self._check_lookahead()
        if self.store != "pinned" and not isinstance(self.store, type):
            raise OasisConfigError(
                f"store: got {self.store!r}, expected 'pinned' or a subclass of oasis_hf.BlockStore"
            )
        cap = self.fetch_cap
        if cap is not None and cap != "auto":
            number = isinstance(cap, int | float) and not isinstance(cap, bool)
            if not number or not 0 <= cap <= 1:  # type: ignore[operator]
                raise OasisConfigError(
                    f"fetch_cap: got {cap!r}, expected 'auto', None (no limit) or a share of the "
                    "budget between 0 and 1 such as 0.05; 0 fetches nothing in the background"
                )
        for name in ("graphs", "compile"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise OasisConfigError(f"{name}: got {value!r}, expected True or False")
        # A group that leaves the tail behind row n holds tokens up to row n - recent_tokens.
        if self.verification == "exact" and self.recent_tokens < self.max_rows - 2:
            raise OasisConfigError(
                f"verification: got 'exact' with recent_tokens={self.recent_tokens} and "
                f"max_rows={self.max_rows}, expected recent_tokens of at least max_rows - 2: a "
                "draft must not leave the tail before it is verified; raise recent_tokens or lower "
                "max_rows"
            )
        if self.compile and not self.graphs:
            raise OasisConfigError(
                "compile: got True with graphs=False, expected graphs=True; what is compiled is "
                "the step that a CUDA graph replays"
            )
        for layer in self.dense_layers:
            if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
                raise OasisConfigError(
                    f"dense_layers: got {self.dense_layers!r}, expected layer numbers like (0, 1)"
                )

    def _check_lookahead(self) -> None:
        chosen = self.lookahead
        if chosen == LRU:
            return
        try:
            found = chosen if isinstance(chosen, Predictor) else predictor(chosen)
        except (ValueError, AttributeError) as error:
            raise OasisConfigError(
                f"lookahead: got {chosen!r}, expected {LRU!r}, 'last', 'rows' or a Predictor object"
            ) from error
        if found.needs is not None:
            raise OasisConfigError(
                f"lookahead: got {chosen!r}, which needs {found.needs}, and the cache does not "
                "know it when a step ends; expected 'last', 'rows' or a Predictor of yours"
            )

    def __repr__(self) -> str:
        values = {name: repr(getattr(self, name)) for name in self.fields()}
        if self.budget != self.budget_tokens:
            values["budget"] += f" ({self.budget_tokens} in blocks of {self.block_tokens})"
        return f"{type(self).__name__}({', '.join(f'{n}={v}' for n, v in values.items())})"

    @property
    def block_tokens(self) -> int:
        """Tokens per block: `block_size`, or what "auto" comes to."""
        if not isinstance(self.block_size, str):
            return self.block_size
        if getattr(self.index, "name", self.index) not in FINE_INDEXES or self.on_miss != "fetch":
            return BLOCK
        if self.budget is None:
            return BLOCK
        size = max(1, self.budget // FINE_BLOCKS)
        return min(BLOCK, max(FINEST_BLOCK, 1 << size.bit_length() - 1))

    @property
    def budget_blocks(self) -> int:
        """K, blocks attended to per KV head; more than any context has for a budget of None."""
        return budgeted_blocks(self.budget, self.block_tokens)

    @property
    def budget_tokens(self) -> int | None:
        """The budget in whole blocks, which is what a step attends to; None for all tokens."""
        return None if self.budget is None else self.budget_blocks * self.block_tokens

    @property
    def cap_blocks(self) -> int:
        """Blocks that may be fetched in the background per head and step; "auto" without a link."""
        share = DEFAULT_CAP if isinstance(self.fetch_cap, str) else self.fetch_cap
        return capped_blocks(share, self.budget_blocks)

    @property
    def misses(self) -> MissPolicy:
        """What `on_miss` says."""
        return policy_of(self.on_miss)

    @property
    def predictor(self) -> Predictor | None:
        """What `lookahead` asks; None where it is the step's own misses."""
        if self.lookahead == LRU:
            return None
        found = self.lookahead
        return found if isinstance(found, Predictor) else predictor(found)

    @property
    def fetches_ahead(self) -> bool:
        """Whether anything is fetched in the background."""
        return self.on_miss != "fetch" or self.lookahead != LRU

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """Names of all options."""
        return tuple(cls.__dataclass_fields__)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, with objects and classes by name."""
        values = {name: getattr(self, name) for name in self.fields()}
        for name in ("index", "lookahead", "store"):
            values[name] = getattr(values[name], "name", values[name])
        values["on_miss"] = getattr(self.on_miss, "name", self.on_miss)
        values["dense_layers"] = list(self.dense_layers)
        return values
