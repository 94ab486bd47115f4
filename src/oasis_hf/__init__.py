"""oasis-hf: a KV cache for Transformers whose contents live in host memory.

Importing this package makes `attn_implementation="oasis"` known to Transformers, and does nothing
else: no patching, no GPU work, no triton.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from .cache import OasisCache
from .config import OasisConfig, OasisConfigError
from .facts.handle import OasisUnsupportedError
from .index import Index
from .integration import attention as _attention
from .lookahead import Predictor
from .misses import MissPolicy
from .saving.persistence import SavedCacheError
from .stats import CacheStats
from .storage import BlockStore, HostMemoryError, PinnedStore

if _TYPE_CHECKING:
    from .conversation import Conversation

_attention.register()

__version__ = "0.1.0"


def __getattr__(name: str) -> _Any:
    """`generation` and `Conversation` are imported when they are first asked for."""
    if name == "generation":
        return _import_module(".generation", __name__)
    if name == "Conversation":
        return _import_module(".conversation", __name__).Conversation
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BlockStore",
    "CacheStats",
    "Conversation",
    "HostMemoryError",
    "Index",
    "MissPolicy",
    "OasisCache",
    "OasisConfig",
    "OasisConfigError",
    "OasisUnsupportedError",
    "PinnedStore",
    "Predictor",
    "SavedCacheError",
    "__version__",
]
