"""What surrounds a call and must not change what it does.

Autocast, inference mode, gradients and `torch.compile` belong to the caller, and may be others in
the next call. What a cache keeps outlives them all: a tensor made in inference mode cannot be
written to outside of it, one that is part of an autograd graph keeps that graph alive, and one
whose dtype follows autocast fits nothing that came before. So the work of a cache runs in the same
surroundings always: no autocast, inference mode, gradients or default device, and no compiled code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from .handle import OasisUnsupportedError

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")
"""Types of device that autocast is switched off for."""

P = ParamSpec("P")
R = TypeVar("R")

_ORDINARY = nullcontext()


def autocast_devices() -> list[str]:
    """Types of device for which autocast is on."""
    return [device for device in AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]


def steady() -> AbstractContextManager[None]:
    """Within this block there is no autocast, inference mode, gradient or default device."""
    if (
        torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES))
        or _default_device()
    ):
        return _changed()
    # The case of `generate`, several times a layer and step.
    return _ORDINARY


@contextmanager
def _changed() -> Iterator[None]:
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        # Second: leaving inference mode switches gradients on.
        stack.enter_context(torch.no_grad())
        for device in autocast_devices():
            stack.enter_context(torch.autocast(device, enabled=False))
        if _default_device():
            stack.enter_context(torch.device("cpu"))
        yield


def _default_device() -> bool:
    """Whether tensors are made elsewhere than in host memory where nothing else is said."""
    # What torch has for this takes ten times as long.
    return torch.empty(0).device.type != "cpu"


def kept_steady(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs as in `steady`; compiled code stops before it and goes on after it."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with steady():
            return function(*args, **kwargs)

    return uncompiled(run)


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """A function that `torch.compile` does not look into."""
    opaque: Callable[P, R] = torch.compiler.disable(
        function, reason="OasisCache is not compiled; leave out fullgraph=True"
    )
    return opaque


class _NoBackward(torch.autograd.Function):
    """The identity, through which no gradient can be had."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *sources: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise OasisUnsupportedError(
            "backward through an OasisCache: it keeps no gradients; generate under "
            "torch.no_grad(), and train without a cache"
        )


def without_gradient(output: Tensor, *sources: Tensor) -> Tensor:
    """`output`, computed without gradients from `sources`: a gradient asked for is an error.

    It would lack what goes through the cache, and nobody would know.
    """
    if not any(source.requires_grad for source in sources):
        return output
    with torch.enable_grad():
        return _NoBackward.apply(output, *sources)


def in_dtype(dtype: torch.dtype, *states: Tensor) -> tuple[Tensor, ...]:
    """`states` in one dtype, whatever autocast made of each."""
    return tuple(state.to(dtype) for state in states)
