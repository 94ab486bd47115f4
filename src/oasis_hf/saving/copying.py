"""Copies of a cache and of what it puts on its model.

`copy.deepcopy(cache)` is the documented way to use a prompt again. A cache is more than tensors:
there are tables of addresses, work alongside the current stream, hooks on the model. So a copy is
built as a new cache is, and takes over what the old one holds: what is resident and what was
counted.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..facts.handle import OasisUnsupportedError
from ..layers.layer import OasisLayer
from ..layers.state import CacheState
from ..storage import BlockStore, limits
from ..storage.limits import require
from ..storage.parts import LayerParts
from ..storage.streams import Beside

C = TypeVar("C", bound=CacheState)

BUILT = {"layers", "hook", "graphs", "turn", "model_config", "oasis_config"}
"""Attributes of a cache that a copy makes for itself."""


@torch.no_grad()
def duplicate(cache: C, memo: dict[int, Any]) -> C:
    """A copy of a cache that goes on exactly as the cache would, and independently.

    It serves the same model, or the model's copy where both are copied together and the model
    comes first.

    Args:
        cache: what to copy.
        memo: copies made so far, by the id of the original, as `copy.deepcopy` keeps them.

    Raises:
        HostMemoryError: there is not as much host memory again.
    """
    cache.settle()
    _require(cache)
    options = {x: getattr(cache.oasis_config, x) for x in type(cache.oasis_config).fields()}
    model = cache.model
    if model is None:
        # Only a cache that has a model can cut prompts: this one's may be gone.
        options["prefill_chunk_size"] = None
    owner = cache.model_config if model is None else memo.get(id(model), model)
    other = type(cache)(owner, **options)
    memo[id(cache)] = other
    memo[id(cache.oasis_config)] = other.oasis_config
    memo[id(cache.ledger)] = other.ledger
    pairs = list(zip(cache.layers, other.layers, strict=True))
    for old, new in pairs:
        memo[id(old)] = new
        if isinstance(old, OasisLayer):
            memo[id(old.allowance)], memo[id(old.prompts)] = new.allowance, new.prompts
    _take_over(other, cache, memo, BUILT)
    _take_over(other.ledger, cache.ledger, memo)
    for old, new in pairs:
        ours = isinstance(old, OasisLayer)
        _take_over(new, old, memo, {"_parts", "step", "is_initialized"} if ours else ())
        if ours and old.is_initialized:
            new.take_over(_parts(old.parts, memo))
    return other


def _parts(old: LayerParts, memo: dict[int, Any]) -> LayerParts:
    """A copy of what a layer is made of, in memory of its own."""
    old.join()
    if id(old.store) not in memo:
        memo[id(old.store)] = _store(old.store)
    new = copy.copy(old)
    _take_over(new, old, memo)
    new.allowance.enter(new)
    new.renew()
    return new


def _take_over(new: Any, old: Any, memo: dict[int, Any], but: Collection[str] = ()) -> None:
    """Give an object copies of another's attributes; weak references are each one's own."""
    for name, value in vars(old).items():
        if name not in but and not isinstance(value, weakref.ref):
            vars(new)[name] = twin(value, memo)


def _require(cache: CacheState) -> None:
    """Check the host memory for everything that is in host memory, before any is taken."""
    needed = 0
    for layer in cache.offloaded:
        if layer.is_initialized:
            parts = layer.parts
            needed += sum(parts.store.taken(slab.nbytes) for slab in parts.store.slabs)
            if parts.device.type == "cpu":
                others = (parts.pool, parts.tail, parts.index, parts.residency)
                needed += sum(part.nbytes for part in others)
    require(
        needed,
        limits.available_bytes(),
        f"a copy of a cache of {cache.ledger.columns} tokens",
        "use a shorter context, a smaller batch or a machine with more memory",
    )


def _store(old: BlockStore) -> BlockStore:
    """A copy of host memory, whose addresses are other ones."""
    new = copy.copy(old)
    new.beside = Beside(old.beside.device)
    # Its own list and table from here on; the old store keeps those that it has.
    new.map_batch(lambda slab: new.like(slab, slab.shape[0]).copy_(slab))
    return new


def twin(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of a part of a cache, of plain Python objects and tensors.

    As `copy.deepcopy`, but a tensor is copied by itself, without the rest of its memory and without
    the graph that computed it, and modules and functions stay what they are.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor):
        made: Any = value.detach().clone()
    elif isinstance(value, dict):
        made = type(value)()
        made.update((key, twin(x, memo)) for key, x in value.items())
    elif type(value) in (list, tuple, set):
        made = type(value)(twin(x, memo) for x in value)
    elif isinstance(value, Beside):
        made = Beside(value.device)
    elif _is_plain(value):
        made = object.__new__(type(value))
        memo[id(value)] = made
        _take_over(made, value, memo)
    elif callable(value) or isinstance(value, weakref.ref | ModuleType):
        return value
    else:
        return copy.deepcopy(value, memo)
    memo[id(value)] = made
    return made


def _is_plain(value: Any) -> bool:
    """Whether an object is nothing but its attributes."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not callable(value)
        and not any(
            getattr(kind, name) is not getattr(object, name)
            for name in ("__reduce_ex__", "__reduce__")
        )
        and not hasattr(kind, "__deepcopy__")
        and not isinstance(value, ModuleType)
    )


def refuse_pickle(what: str) -> OasisUnsupportedError:
    """The error for an attempt to pickle a cache or a part of one."""
    return OasisUnsupportedError(
        f"pickle: got {what}, whose contents are spread over host memory and devices and belong to "
        "a model; use cache.save(path) and OasisCache.load(path, model), or copy.deepcopy(cache) "
        "within this process"
    )
