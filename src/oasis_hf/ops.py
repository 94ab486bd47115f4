"""The only door to the kernels package: picks the backend that serves a device."""

from types import ModuleType

import torch

from oasis_kernels import BACKENDS, backend

from .config import OasisConfigError


def kernels(name: str, device: torch.device) -> ModuleType:
    """The operations that serve `device`.

    Args:
        name: "reference", "triton" or "auto" (triton on CUDA where this build has it).
        device: where the working set lives.

    Raises:
        OasisConfigError: the backend is not part of this build, or cannot serve the device.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" and "triton" in BACKENDS else "reference"
    if name not in BACKENDS:
        raise OasisConfigError(
            f"backend: got {name!r}, but this build has only {sorted(BACKENDS)}; use backend='auto'"
        )
    return backend(name)
