"""oasis-hf: a KV cache for Transformers whose contents live in host memory.

Importing this package makes `attn_implementation="oasis"` known to Transformers, and does nothing
else: no patching, no GPU work, no triton.
"""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from . import attention as _attention
from .cache import OasisCache
from .config import OasisConfig, OasisConfigError
from .handle import OasisUnsupportedError
from .index import Index
from .persistence import SavedCacheError
from .stats import CacheStats
from .tiers import HostMemoryError

_attention.register()

__version__ = "0.1.0"


def __getattr__(name: str) -> _ModuleType:
    """`oasis_hf.generation` is imported when it is first asked for."""
    if name == "generation":
        return _import_module(".generation", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CacheStats",
    "HostMemoryError",
    "Index",
    "OasisCache",
    "OasisConfig",
    "OasisConfigError",
    "OasisUnsupportedError",
    "SavedCacheError",
    "__version__",
]
