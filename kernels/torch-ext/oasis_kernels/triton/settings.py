"""Launch settings as data, per GPU, with a safe default. Nothing is tuned at run time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """How kernels are launched.

    Attributes:
        bounds_groups: groups per program of the bounds scan.
        bounds_warps: its warps.
        fine_groups: groups per program of the two-bit scan.
        fine_warps: its warps.
        plan_warps: warps of the one program per head that chooses and plans.
        attention_slots: slots per step of the attention loop.
        attention_programs: programs per head that attention is split into, before the tail's.
        attention_warps: its warps.
        gather_programs: programs of a background gather.
        gather_warps: its warps.
    """

    bounds_groups: int = 64
    bounds_warps: int = 4
    fine_groups: int = 2
    fine_warps: int = 4
    plan_warps: int = 8
    attention_slots: int = 4
    attention_programs: int = 16
    attention_warps: int = 4
    gather_programs: int = 32
    gather_warps: int = 16


DEFAULT = Settings()
BY_GPU: dict[str, Settings] = {}
"""Settings measured on a GPU, by the name that torch gives it."""


def settings(gpu: str | None) -> Settings:
    """The settings for a GPU by name, or the default."""
    return BY_GPU.get(gpu or "", DEFAULT)
