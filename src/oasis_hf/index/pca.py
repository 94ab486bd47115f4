"""Keys in their principal directions, in two planes of two bits: 2.5 bits per key element."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..geometry import ceil_div
from ..ops import Parts, Queries, Scores
from .base import Index
from .kernel import IndexKernel

GROUP_TOKENS = 32
PRIOR_QUERIES = 64
"""Queries alike in all directions that are counted with those that were seen."""
OUTGROWN = 2
"""The basis is learned anew once a context is so many times as long as when it was learned,"""
ENOUGH_TOKENS = 32768
"""but not once it has been learned from so many tokens."""
STEP, WIDER = 0.996, 1.25
"""Step at two bits, in standard deviations: the best for a normal distribution, and how much wider
it is here, as the keys that matter lie far out."""
QUERIES_AT_ONCE = 4096
"""Tokens of a forward whose queries are looked at, evenly spaced."""
LEAST_DEVIATION = 1e-3
"""Of a direction, as a part of the largest one's."""
TOKENS_AT_ONCE = 16384
"""Tokens that are rotated together, which bounds the memory that it takes."""


class PrincipalKeysKernel(IndexKernel):
    """One scan of all codes; groups that leave the tail are rotated and quantised on the way."""

    writes = True

    def write(self, ops: Any, index: Any, parts: Parts, moved: Tensor) -> None:
        """As in `IndexKernel`."""
        learned, arrays = index.learned, index.arrays
        ops.write_principal(
            parts.tail.k,
            learned["encode"],
            learned["shift"],
            parts.frontier.committed,
            moved,
            arrays["codes"],
            arrays["fine"],
            parts.rules.group,
            parts.rules.flushes,
        )

    def scan(self, ops: Any, index: Any, parts: Parts, queries: Queries, blocks: int) -> Scores:
        """As in `IndexKernel`."""
        learned, arrays = index.learned, index.arrays
        scores: Scores = ops.principal(
            queries.query.contiguous().flatten(2, 3),
            learned["decode"],
            learned["origin"],
            arrays["codes"],
            arrays["fine"],
            parts.frontier.committed,
            parts.tail.k,
            parts.frontier.lengths,
            queries.positions,
            queries.spec.scaling,
            parts.rules.block,
            blocks,
        )
        return scores


class PrincipalKeysIndex(Index):
    """Estimates each block's attention from keys at 2.5 bits in their principal directions.

    A basis per sequence and KV head in which errors of all directions weigh alike: keys are
    decorrelated, and directions scaled by how strongly the queries read them. The quarter of the
    directions with the largest variance has four bits, the others two. The upper two bits of all
    directions make one plane (`codes`), the lower two of that quarter another (`fine`).

    The basis is learned from a sequence's keys and queries when it outgrows the budget, and again
    when it has become much longer.
    Kin: the principal directions of keys in Loki (arXiv 2406.02542).

    Attributes:
        learned: `encode` `[B, H, D, D]` and `shift` `[B, H, D]`, so that the codes of a key are
            `floor(key @ encode + shift)` within their bits; `decode` `[B, H, D, D]` and `origin`
            `[B, H, D]`, so that it is estimated by `origin + decode @ codes`; `moment`
            `[B, H, D, D]`, the sum of the outer products of `queries` `[B, 1]` queries.
        tokens: that the basis was learned from.
    """

    name = "pca"
    estimates_mass = True
    learns = True
    kernels: ClassVar = {"triton": PrincipalKeysKernel()}

    @classmethod
    def group_tokens(cls, block: int) -> int:
        """32 tokens, or the block where that is larger."""
        return max(GROUP_TOKENS, block)

    def kernel(self, backend: str) -> IndexKernel | None:
        """Kernels for blocks of four tokens and more, which share bytes."""
        return super().kernel(backend) if self.block % 4 == 0 else None

    # ---- the basis -----------------------------------------------------------------------------

    def allocate(self, batch: int, heads: int, example: Tensor) -> None:
        """As in `Index`, and no basis yet."""
        self.tokens = 0
        dim, wide = example.shape[-1], torch.float32
        narrow = wide if example.dtype == wide else torch.bfloat16

        def zeros(*shape: int, dtype: torch.dtype = wide) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=example.device)

        self.learned = {
            "encode": zeros(heads, dim, dim, dtype=narrow),
            "shift": zeros(heads, dim),
            "decode": zeros(heads, dim, dim, dtype=narrow),
            "origin": zeros(heads, dim),
            "moment": zeros(heads, dim, dim),
            "queries": zeros(1),
        }
        groups = self.capacity * self.block // self.group_tokens(self.block)
        rows = heads, groups + 1, self.group_tokens(self.block) // 4
        self.arrays = {
            "codes": zeros(*rows, dim, dtype=torch.uint8),
            "fine": zeros(*rows, leading(dim), dtype=torch.uint8),
        }

    def observe(self, query: Tensor, valid: Tensor | None) -> None:
        """Add to the second moment of the queries, as long as it may be asked for."""
        if "moment" not in self.learned:
            return
        stride = ceil_div(query.shape[3], QUERIES_AT_ONCE)
        rows = _numbers(query[:, :, :, ::stride])
        if valid is None:
            count: Tensor | int = rows.shape[3]
        else:
            valid = valid[:, ::stride]
            rows, count = rows * valid[:, None, None, :, None], valid.sum(-1, keepdim=True)
        rows = rows.flatten(2, 3)
        self.learned["moment"] += rows.transpose(-1, -2) @ rows
        self.learned["queries"] += count * query.shape[2]

    def fit(self, rows: slice, keys: Tensor) -> None:
        """Find the directions of keys, and the range of each."""
        mean, spread = _moments(keys)
        # With q = root w, where the parts of w are uncorrelated and of variance 1, q . k is
        # w . (root^T k): errors of root^T k weigh alike in all directions.
        root = torch.linalg.cholesky(self._query_moment(rows).double()).float()
        deviation, basis = _directions(root.transpose(-1, -2) @ spread @ root)
        deviation = deviation.maximum(LEAST_DEVIATION * deviation[..., :1]).clamp(min=1e-6)
        to, back = (
            root @ basis,
            torch.linalg.solve_triangular(root.transpose(-1, -2), basis, upper=True),
        )
        lead = leading(keys.shape[-1])
        least, most = _range(keys, mean, to[..., :lead])
        step, middle = WIDER * STEP * deviation, torch.full_like(deviation, 2.0)
        step[..., :lead] = ((most - least) / 15).clamp(min=1e-6)
        middle[..., :lead] = 0.5 - least / step[..., :lead]
        encode = (to / step[..., None, :]).to(self.learned["encode"].dtype)
        decode = (back * step[..., None, :]).to(self.learned["decode"].dtype)
        self.learned["encode"][rows], self.learned["decode"][rows] = encode, decode
        self.learned["shift"][rows] = middle - _times(mean, encode)
        self.learned["origin"][rows] = mean - _times(middle - 0.5, decode.transpose(-1, -2))

    def fitted(self, tokens: int) -> None:
        """As in `Index`; of many tokens it is for good, and the queries' moment is not kept."""
        super().fitted(tokens)
        self.tokens = tokens
        if tokens >= ENOUGH_TOKENS:
            for name in ("moment", "queries"):
                self.learned.pop(name, None)

    def outdated(self, tokens: int) -> bool:
        """Whether there is no basis yet, or one of a small part of what there is now."""
        return not self.ready or ("moment" in self.learned and tokens >= OUTGROWN * self.tokens)

    def knowledge(self) -> dict[str, Tensor]:
        """As in `Index`: all that was learned, and of how many tokens."""
        return {**self.learned, "tokens": torch.tensor([self.tokens])}

    def know(self, knowledge: Mapping[str, Tensor]) -> None:
        """As in `Index`."""
        given = dict(knowledge)
        self.tokens = int(given.pop("tokens"))
        device = self.learned["encode"].device
        self.learned = {name: x.to(device, copy=True) for name, x in given.items()}
        self.ready = self.tokens > 0

    def _query_moment(self, rows: slice) -> Tensor:
        """Mean outer product of the queries, with queries alike in all directions among them."""
        moment = self.learned["moment"][rows]
        seen = self.learned["queries"][rows, :, None, None]
        size = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        unit = torch.eye(moment.shape[-1], device=moment.device)
        # Of none, all directions count alike.
        alike = torch.where(size > 0, size / seen.clamp(min=1), 1.0)
        return (moment + PRIOR_QUERIES * alike * unit) / (seen + PRIOR_QUERIES)

    # ---- keys ----------------------------------------------------------------------------------

    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        """Both planes of groups of all sequences."""
        return self.encode_rows(slice(None), keys)

    def encode_rows(self, rows: slice, keys: Tensor) -> dict[str, Tensor]:
        """Codes of keys `[B', H, n, g, D]`: bytes `[B', H, n, g / 4, D]`, and of the quarter."""
        tokens, dim = keys.shape[3:]
        encode, shift = (self.learned[name][rows] for name in ("encode", "shift"))
        parts = []
        for part in keys.split(max(1, TOKENS_AT_ONCE // tokens), 2):
            flat = part.flatten(2, 3).float()
            level = (flat @ encode.float()).add_(shift[:, :, None]).floor_()
            level[..., : leading(dim)].clamp_(0, 15)
            level[..., leading(dim) :].clamp_(0, 3)
            parts.append(
                self.ops.pack_planes(level.to(torch.uint8).unflatten(2, (-1, tokens)), leading(dim))
            )
        codes, fine = (torch.cat(plane, 2) for plane in zip(*parts, strict=True))
        return {"codes": codes, "fine": fine}

    def write(self, group: Tensor, keys: Tensor, keep: Tensor) -> None:
        """As in `Index`; nothing before there is a basis."""
        if self.ready:
            super().write(group, keys, keep)

    # ---- scores --------------------------------------------------------------------------------

    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        """Log of the block's summed attention under estimated keys."""
        tokens, last = self.group_tokens(self.block), self.ops.last_live(live)
        groups = max(1, ceil_div(last * self.block, tokens))
        codes, fine = (self.arrays[name][:, :, :groups] for name in ("codes", "fine"))
        decode, origin = self.learned["decode"].float(), self.learned["origin"]
        level = self.ops.unpack_planes(codes, fine).flatten(2, 3)
        logits = (query @ decode) @ level.transpose(-1, -2)
        logits += query @ origin[..., None]
        logits = torch.logsumexp(logits.unflatten(-1, (-1, self.block)), -1)
        missing = live.shape[-1] - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))


def leading(dim: int) -> int:
    """Directions that have four bits, of `dim`."""
    return max(1, dim // 4)


def _numbers(x: Tensor) -> Tensor:
    """In float32; what is no number in a context must not keep the rest from being read."""
    return torch.nan_to_num(x.float(), 0.0, 0.0, 0.0)


def _moments(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Mean `[B, H, D]` and covariance `[B, H, D, D]` of keys `[B, H, n, D]`."""
    parts, count = keys.split(TOKENS_AT_ONCE, 2), keys.shape[2]
    mean = torch.stack([_numbers(part).sum(2) for part in parts]).sum(0) / count
    spread = mean.new_zeros(*mean.shape, mean.shape[-1])
    for part in parts:
        centred = _numbers(part) - mean[:, :, None]
        spread += centred.transpose(-1, -2) @ centred / count
    return mean, spread


def _directions(spread: Tensor) -> tuple[Tensor, Tensor]:
    """Standard deviations `[..., D]`, largest first, and directions `[..., D, D]` as columns.

    In float64, and with a little of the identity: covariances of few tokens have no full rank.
    """
    exact = spread.double()
    exact = (exact + exact.transpose(-1, -2)) / 2
    exact.diagonal(dim1=-2, dim2=-1).add_(1e-9 * exact.diagonal(dim1=-2, dim2=-1).mean(-1, True))
    variance, basis = torch.linalg.eigh(exact)
    return variance.clamp(min=0).sqrt().flip(-1).float(), basis.flip(-1).float()


def _range(keys: Tensor, mean: Tensor, to: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest of keys `[B, H, n, D]` in directions `[B, H, D, d]`: `[B, H, d]` each."""
    least, most = [], []
    for part in keys.split(TOKENS_AT_ONCE, 2):
        turned = (_numbers(part) - mean[:, :, None]) @ to
        least.append(turned.amin(2))
        most.append(turned.amax(2))
    return torch.stack(least).amin(0), torch.stack(most).amax(0)


def _times(vector: Tensor, matrix: Tensor) -> Tensor:
    """`[..., D]` times `[..., D, D]`, in float32."""
    return (vector[..., None, :] @ matrix.float())[..., 0, :]
