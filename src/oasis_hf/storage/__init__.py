"""Where blocks live: the full store in host memory, the resident pool and the tail in HBM."""

from typing import Any

from ..config import OasisConfigError
from .block_store import BlockStore
from .limits import HostMemoryError
from .pinned_store import PinnedStore
from .pool import ResidentPool, Tail


def store_class(store: Any) -> type[BlockStore]:
    """The class that the option `store` names.

    Raises:
        OasisConfigError: neither "pinned" nor a subclass of `BlockStore`, or one that lacks a
            method.
    """
    if store == PinnedStore.name:
        return PinnedStore
    if not (isinstance(store, type) and issubclass(store, BlockStore)):
        raise OasisConfigError(
            f"store: got {store!r}, expected 'pinned' or a subclass of oasis_hf.BlockStore"
        )
    missing = sorted(getattr(store, "__abstractmethods__", ()))
    if missing or not isinstance(getattr(store, "name", None), str):
        raise OasisConfigError(
            f"store: {store.__name__} has no {', '.join(missing) or 'name'}, expected every method "
            "and attribute of oasis_hf.BlockStore; a subclass of oasis_hf.PinnedStore has them"
        )
    return store


__all__ = [
    "BlockStore",
    "HostMemoryError",
    "PinnedStore",
    "ResidentPool",
    "Tail",
    "store_class",
]
