"""Where blocks live: the full store in host memory, the resident pool and the tail in HBM."""

from .hbm import ResidentPool, Tail
from .host import HostStore
from .limits import HostMemoryError

__all__ = ["HostMemoryError", "HostStore", "ResidentPool", "Tail"]
