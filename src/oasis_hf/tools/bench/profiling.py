"""Where the time of a decode step goes, by kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

TOP = 20
NAME = 100
"""Characters kept of a kernel's name; those of templates run to thousands."""


def kernel_times(step: Callable[[], Any], repeats: int = 5) -> list[dict[str, Any]]:
    """Profile a step that has run before, its graph captured; see `breakdown`."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    found = [
        (event.key, event.count, event.self_device_time_total)
        for event in trace.key_averages()
        if event.device_type == DeviceType.CUDA
    ]
    return breakdown(found, repeats)


def breakdown(found: Iterable[tuple[str, int, float]], steps: int) -> list[dict[str, Any]]:
    """The `TOP` kernels by time, and the others as one.

    Args:
        found: name, calls and microseconds of each kernel, over all steps.
        steps: steps profiled.

    Returns:
        Rows of `name`, `calls` and `us` per step and `share` of the sum. Kernels that run beside
        each other both count, so the sum may exceed the time of a step.
    """
    ranked = sorted(found, key=lambda kernel: -kernel[2])
    total = sum(us for _, _, us in ranked)
    shown = [(name[:NAME], calls, us) for name, calls, us in ranked[:TOP]]
    if rest := ranked[TOP:]:
        calls, us = sum(kernel[1] for kernel in rest), sum(kernel[2] for kernel in rest)
        shown.append((f"{len(rest)} others", calls, us))
    return [
        {"name": name, "calls": calls / steps, "us": us / steps, "share": us / total}
        for name, calls, us in shown
    ]
