"""Kernels of oasis-hf: block-sparse attention, key index and host transfers, per backend."""

from .api import BACKENDS, available, backend

__all__ = ["BACKENDS", "available", "backend"]
