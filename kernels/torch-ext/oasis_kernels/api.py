"""Public entry of the kernels: a backend is a module, imported when it is first asked for."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

BACKENDS = ("reference", "triton")


def available(name: str) -> bool:
    """Whether a backend's requirements are installed; imports nothing."""
    return name == "reference" or (name == "triton" and find_spec("triton") is not None)


def backend(name: str) -> ModuleType:
    """The module of a backend. Backends never stand in for each other.

    Raises:
        ValueError: unknown name.
        ImportError: its requirements are not installed.
    """
    if name not in BACKENDS:
        raise ValueError(f"kernel backend: got {name!r}, expected one of {', '.join(BACKENDS)}")
    return import_module(f"{__package__}.{name}")
