"""Launch settings as data, per GPU, with a safe default. Nothing is tuned at run time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """How attention is split.

    Attributes:
        slots: slots of 16 tokens per step of the loop.
        programs: programs per KV head, before the tail's.
        warps: warps per program.
        registers: most registers of a thread; None leaves it to the compiler.
    """

    slots: int
    programs: int
    warps: int
    registers: int | None = None


@dataclass(frozen=True)
class Settings:
    """How kernels are launched.

    Attributes:
        bounds_groups: groups per program of the bounds scan.
        bounds_warps: its warps.
        candidate_warps: warps of the one program per head that picks candidate groups.
        candidate_warps_wide: the same, for more than 2,048 groups.
        fine_groups: groups per program of the two-bit scan, at most.
        fine_warps: its warps.
        fine_registers: most registers of its threads with `many_pairs` pairs: more programs fit.
        turn_warps: warps of the programs that turn queries into principal directions.
        principal_rows: rows of four tokens per program of the scan in principal directions.
        principal_warps: its warps.
        plan_warps: warps of the one program per head that chooses and plans.
        plan_warps_wide: the same, for more than 2,048 candidates.
        attention_few: split of the attention of few (sequence, head) pairs.
        attention_many: split for `many_pairs` pairs and more, which fill the GPU by themselves.
        many_pairs: where the second begins.
        gather_programs: programs of a background gather.
        gather_warps: its warps.
    """

    bounds_groups: int = 64
    bounds_warps: int = 4
    candidate_warps: int = 8
    candidate_warps_wide: int = 16
    fine_groups: int = 8
    fine_warps: int = 4
    fine_registers: int = 80
    turn_warps: int = 4
    principal_rows: int = 128
    principal_warps: int = 4
    plan_warps: int = 8
    plan_warps_wide: int = 16
    attention_few: Split = Split(8, 8, 4)
    attention_many: Split = Split(4, 4, 2, 168)
    many_pairs: int = 32
    gather_programs: int = 32
    gather_warps: int = 16


DEFAULT = Settings()
"""Measured on an H200 for 8 KV heads of dimension 128 at batch 1 and 8, 32K and 128K tokens."""

BY_GPU: dict[str, Settings] = {}
"""Settings measured on another GPU, by the name that torch gives it."""


def settings(gpu: str | None) -> Settings:
    """The settings for a GPU by name, or the default."""
    return BY_GPU.get(gpu or "", DEFAULT)
