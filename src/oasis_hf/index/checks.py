"""Checks of an index that is not built in: once when a layer is built, and on its first scores.

What an index returns goes straight into tables and scores, where a wrong shape may broadcast and a
NaN is never chosen: the answers would only get worse. So it is tried on a few random keys, before
anything is stored, and its first scores of real keys are looked at. Later steps are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..config import OasisConfigError
from .base import Index
from .scores import check_scores

BATCH, GROUPS, ROWS = 2, 3, 5
"""Sequences, groups and query rows that an index is tried on: all different, and more than one."""
EVERY = slice(None)
LEAST_AGREEMENT = 0.9
"""Share of a group's summary that must not depend on the groups summarised in the same call."""
MASS_SLACK = 1.0
"""How far, in logits, an estimate of a block's attention may lie from its known value."""


def check_class(index: type[Index], taken: Iterable[str]) -> None:
    """Check what can be told of a class alone.

    Args:
        index: a class that is not built in.
        taken: names of the built-in ones.

    Raises:
        OasisConfigError: the class cannot be used.
    """
    label = f"index {index.__name__}"
    missing = sorted(getattr(index, "__abstractmethods__", ()))
    if missing:
        raise OasisConfigError(
            f"{label}: got a class without {', '.join(missing)}, expected a subclass of Index that "
            "defines encode and block_logits"
        )
    name = getattr(index, "name", None)
    if not isinstance(name, str) or not name:
        raise OasisConfigError(
            f"{label}: got the name {name!r}, expected a text such as {index.__name__.lower()!r}; "
            "set the class attribute 'name'"
        )
    if name in taken:
        raise OasisConfigError(
            f"{label}: got the name {name!r}, which is that of a built-in index, expected another; "
            "saved caches and reports tell indexes apart by it"
        )
    if not isinstance(index.estimates_mass, bool):
        raise OasisConfigError(
            f"{label}: got estimates_mass={index.estimates_mass!r}, expected True or False"
        )


def check_group(index: type[Index], block: int) -> int:
    """Tokens that a class which is not built in encodes together.

    Raises:
        OasisConfigError: they are no multiple of the block.
    """
    label = f"index {index.__name__}"
    group = _called(f"{label}: group_tokens({block})", index.group_tokens, block)
    whole = isinstance(group, int) and not isinstance(group, bool)
    if not whole or group < block or group % block:
        raise OasisConfigError(
            f"{label}: got {group!r} from group_tokens({block}), expected a whole multiple of the "
            f"block size, {block}"
        )
    return int(group)


def check_index(make: Callable[[], Index], heads: int, example: Tensor) -> None:
    """Try an index on random keys.

    Args:
        make: builds one, of a class that is not built in.
        heads: KV heads.
        example: a tensor of the dtype, device and last dimension of the keys.

    Raises:
        OasisConfigError: it breaks the contract of `Index`; the message names class and method.
    """
    with torch.no_grad(), torch.autocast(example.device.type, enabled=False):
        trial = _Trial(make(), heads, example)
        trial.encode()
        trial.score()


class _Trial:
    """One index, and random keys like those that it will meet."""

    def __init__(self, index: Index, heads: int, example: Tensor) -> None:
        self.index, self.label = index, f"index {type(index).__name__}"
        self.group, self.heads = index.group_tokens(index.block), heads
        self.random, self.device = torch.Generator().manual_seed(0), example.device
        keys = self._draw(BATCH, heads, GROUPS, self.group, example.shape[-1])
        self.keys = keys.to(example.dtype)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device)

    def _learn(self) -> None:
        """Have an index that learns know the keys."""
        index = self.index
        if index.learns:
            index.allocate(BATCH, self.heads, self.keys)
            index.observe(self.keys[:, :, :1], None)
            index.fit(slice(0, BATCH), self.keys.flatten(2, 3))
            index.fitted(self.keys.shape[2] * self.group)

    def _summary(self, keys: Tensor, rows: slice = EVERY) -> dict[str, Tensor]:
        """What `encode` returns for keys `[B, H, n, g, D]`, checked."""
        label, given = f"{self.label}: encode", keys.clone()
        what = f"{label} of keys {tuple(keys.shape)}"
        parts = _called(what, self.index.encode_rows, rows, keys)
        if not torch.equal(keys, given):
            raise OasisConfigError(
                f"{label}: got its keys written to, expected them left as they are: they are the "
                "ones that will be attended to; work on a copy"
            )
        if not isinstance(parts, dict) or not all(isinstance(name, str) for name in parts):
            raise OasisConfigError(
                f"{label}: got a {type(parts).__name__}, expected a dict of tensors by name"
            )
        leading = tuple(keys.shape[:3])
        for name, part in parts.items():
            what = f"{label}: part {name!r}"
            if not isinstance(part, Tensor):
                raise OasisConfigError(f"{what}: got a {type(part).__name__}, expected a tensor")
            if part.ndim < 4 or tuple(part.shape[:3]) != leading:
                raise OasisConfigError(
                    f"{what}: got {tuple(part.shape)}, expected {leading} and at least one more "
                    "dimension: [batch, heads, groups, ...], a summary of each group by itself"
                )
            if part.device != keys.device:
                raise OasisConfigError(f"{what}: got {part.device}, expected {keys.device}")
            if part.is_floating_point() and not bool(torch.isfinite(part.float()).all()):
                raise OasisConfigError(
                    f"{what}: got NaN or infinity for finite keys, expected finite numbers"
                )
        return parts

    def encode(self) -> None:
        """Check what `encode` returns, and that it is the same in another call."""
        self._learn()
        parts = self._summary(self.keys)
        again = self._summary(self.keys[1:, :, 1:2].clone(), slice(1, 2))
        kinds = [{n: (p.dtype, tuple(p.shape[3:])) for n, p in x.items()} for x in (parts, again)]
        if list(kinds[0].items()) != list(kinds[1].items()):
            raise OasisConfigError(
                f"{self.label}: encode: got {kinds[1]} after {kinds[0]}, expected the same names, "
                "dtypes and sizes in every call"
            )
        for name, part in parts.items():
            if _agreement(part[1:, :, 1:2], again[name]) < LEAST_AGREEMENT:
                raise OasisConfigError(
                    f"{self.label}: encode: part {name!r}: got other values for a group alone than "
                    "among others, expected a summary of each group by itself, always the same"
                )

    def score(self) -> None:
        """Check what `block_logits` returns, and what it claims."""
        index, blocks = self.index, GROUPS * self.group // self.index.block
        index.ensure(blocks)
        index.allocate(BATCH, self.heads, self.keys)
        self._learn()
        index.write_range(slice(0, BATCH), 0, self.keys)
        query = self._draw(BATCH, self.heads, ROWS, self.keys.shape[-1])
        live = torch.ones(BATCH, 1, blocks, dtype=torch.bool, device=self.device)
        label = f"{self.label}: block_logits"
        before = {name: array.clone() for name, array in index.arrays.items()}
        found = []
        for rows in (query, torch.zeros_like(query)):
            found.append(_called(label, index.block_logits, rows, live))
            check_scores(type(index).__name__, found[-1], rows, torch.ones_like(live))
        same = before.keys() == index.arrays.keys() and all(
            _agreement(array, index.arrays[name]) == 1 for name, array in before.items()
        )
        if not same or not bool(live.all()):
            raise OasisConfigError(
                f"{label}: got self.arrays or 'live' changed, expected them left as they are"
            )
        if index.estimates_mass:
            self._check_mass(found[1])

    def _check_mass(self, logits: Tensor) -> None:
        """To a query of zeros, every token's unnormalised attention is one."""
        known = math.log(self.index.block)
        kept = logits[logits > -math.inf]
        if kept.numel() and bool(((kept - known).abs() > MASS_SLACK).any()):
            worst = float(kept[(kept - known).abs().argmax()])
            raise OasisConfigError(
                f"{self.label}: block_logits: got {worst:.2f} for a query of zeros, expected "
                f"log(block size) = {known:.2f}: estimates_mass=True says that exp(block_logits) "
                "estimates a block's unnormalised attention; set estimates_mass=False, or add up "
                "the block's tokens"
            )


def _called(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a method of the index; an error of its own is told as one."""
    try:
        return function(*args)
    except Exception as error:
        raise OasisConfigError(f"{what}: raised {type(error).__name__}: {error}") from error


def _agreement(one: Tensor, other: Tensor) -> float:
    """Share of the numbers of two tensors of one shape that are the same, but for rounding."""
    if one.shape != other.shape:
        return 0.0
    if not one.numel():
        return 1.0
    if not one.is_floating_point():
        return float((one == other).float().mean())
    one, other = one.float(), other.float()
    return float(((one - other).abs() <= 1e-2 * other.abs().amax()).float().mean())
