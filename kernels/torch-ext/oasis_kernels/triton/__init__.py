"""Triton backend: kernels, fused where a step gains from it."""

from .buffers import Plan
from .launch import advance, gather, plan_step, sparse_attention
from .planes import principal, write_principal
from .scan import bounds, candidates, keys2bit
from .step import FORMS, again, append, attend, fetch, given, new_plan, open_step, plan

__all__ = [
    "FORMS",
    "Plan",
    "advance",
    "again",
    "append",
    "attend",
    "bounds",
    "candidates",
    "fetch",
    "gather",
    "given",
    "keys2bit",
    "new_plan",
    "open_step",
    "plan",
    "plan_step",
    "principal",
    "sparse_attention",
    "write_principal",
]
