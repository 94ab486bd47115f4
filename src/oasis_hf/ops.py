"""The only door to the kernels package: its data, and the backend that serves a device."""

from types import ModuleType

import torch

from oasis_kernels import available, backend
from oasis_kernels.api import (
    LATER,
    NOW,
    SUMS,
    WRITTEN,
    AttentionSpec,
    Choice,
    Parts,
    Queries,
    Rules,
    Scores,
)

from .config import OasisConfigError


def choose_backend(name: str, device: torch.device, addressable: bool = True) -> str:
    """The backend that serves `device`.

    Args:
        name: "reference", "triton" or "auto" (triton on CUDA, where triton is installed).
        device: where the working set lives.
        addressable: whether kernels can follow addresses into the store.

    Raises:
        OasisConfigError: the backend asked for is not installed, or cannot read the store.
    """
    if name == "auto":
        triton = device.type == "cuda" and available("triton") and addressable
        return "triton" if triton else "reference"
    if name == "triton" and not addressable:
        raise OasisConfigError(
            "backend: got 'triton' with a store that is not addressable by kernels, expected "
            "'reference' or 'auto'"
        )
    if not available(name):
        raise OasisConfigError(
            f"backend: got {name!r}, but it is not installed; pip install 'oasis-hf[gpu]', or use "
            "backend='reference'"
        )
    return name


def kernels(name: str) -> ModuleType:
    """The operations of a backend; importing "triton" imports triton."""
    return backend(name)


__all__ = [
    "LATER",
    "NOW",
    "SUMS",
    "WRITTEN",
    "AttentionSpec",
    "Choice",
    "Parts",
    "Queries",
    "Rules",
    "Scores",
    "choose_backend",
    "kernels",
]
