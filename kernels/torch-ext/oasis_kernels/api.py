"""Public entry of the kernels: one name per operation, served by an explicitly chosen backend."""

from types import ModuleType

from . import reference

BACKENDS: dict[str, ModuleType] = {"reference": reference}


def backend(name: str) -> ModuleType:
    """The module that implements every operation for `name`.

    Raises:
        ValueError: unknown backend. Backends never stand in for each other.
    """
    try:
        return BACKENDS[name]
    except KeyError:
        raise ValueError(
            f"kernel backend: got {name!r}, expected one of {sorted(BACKENDS)}"
        ) from None
