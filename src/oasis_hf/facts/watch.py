"""Whether a model is still the one that something was derived from, such as a captured graph.

A graph has the addresses of a model's weights, the code that its modules ran, and every number
that this code took from Python. Values that change in place are read anew by each replay; all else
makes it stale: other weights, another device or type, an adapter that is switched, merged, scaled
or disabled, another module or hook, training mode.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

ADAPTER = ("_active_adapter", "_disable_adapters")
"""Attributes by which a module that adapters live in is known: those of PEFT's layers."""

PLAIN = (bool, int, float, str, type(None), torch.dtype)
INSIDE = ("_parameters", "_buffers")
"""Where a module keeps its tensors."""

Part = tuple[Any, ...]


class ModelWatch:
    """Remembers what a model was made of.

    Whole looks take a millisecond or two, so they belong at prompts. A glance at a few modules
    takes microseconds, and finds whatever is done to all of a model at once, as `model.to`,
    `model.train` and the switches of PEFT do.

    Args:
        model: the model. What holds it, and hooks on itself, run outside of its forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._whole: list[Part] | None = None
        self._sentinels: list[tuple[weakref.ref[nn.Module], Part]] = []

    def look(self) -> None:
        """Remember what the model is made of now."""
        model = self._model()
        if model is None:
            self._whole, self._sentinels = None, []
            return
        modules = list(model.modules())
        self._whole = self._parts(modules)
        chosen = _sentinels(modules)
        parts = self._parts(chosen)
        self._sentinels = [(weakref.ref(x), part) for x, part in zip(chosen, parts, strict=True)]

    def forget(self) -> None:
        """Have the model count as changed until it is looked at."""
        self._whole = None

    def changed(self, thoroughly: bool) -> bool:
        """Whether the model is another than when it was last looked at; True before that.

        Args:
            thoroughly: look at everything, rather than at a few modules.
        """
        model = self._model()
        if model is None or self._whole is None:
            return True
        if thoroughly:
            return self._parts(model.modules()) != self._whole
        modules = [ref() for ref, _ in self._sentinels]
        if any(module is None for module in modules):
            return True
        return self._parts(modules) != [part for _, part in self._sentinels]

    def _parts(self, modules: Iterable[Any]) -> list[Part]:
        model = self._model()
        return [_part(module, module is model) for module in modules]


def _sentinels(modules: list[nn.Module]) -> list[nn.Module]:
    """A few modules: the model, the first and the last with weights, and with adapters."""
    holders = [x for x in modules if x._parameters]
    adapted = [x for x in modules if any(name in vars(x) for name in ADAPTER)]
    chosen = [*modules[:1], *holders[:1], *holders[-1:], *adapted[:1], *adapted[-1:]]
    return list(dict.fromkeys(chosen))


def _part(module: nn.Module, outermost: bool) -> Part:
    """What code and graph take from one module."""
    own = vars(module)
    settings = tuple(
        (name, _plain(x)) for name, x in own.items() if "_hooks" not in name and _is_plain(x)
    )
    tensors = tuple(
        (name, _address(x)) for kind in INSIDE for name, x in own[kind].items() if x is not None
    )
    # Numbers of hooks are never given twice.
    hooks = () if outermost else (*own["_forward_hooks"], *own["_forward_pre_hooks"])
    # A forward of the instance's own, such as a hook that moves weights. The method is kept: its
    # number would be given again.
    forward = None if outermost else own.get("forward")
    return weakref.ref(module), settings, tensors, hooks, forward


def _is_plain(x: Any) -> bool:
    if isinstance(x, dict):
        return bool(x) and all(type(part) in PLAIN for part in x.values())
    if isinstance(x, list | tuple):
        return all(type(part) in PLAIN for part in x)
    return type(x) in PLAIN


def _plain(x: Any) -> Any:
    """A copy that later changes leave alone."""
    if isinstance(x, dict):
        return tuple(x.items())
    return tuple(x) if isinstance(x, list) else x


def _address(tensor: Tensor) -> Part:
    """Where a tensor is and how it is read; of one without an address, which it is."""
    try:
        place: Any = tensor.data_ptr()
    except RuntimeError:
        place = WeakIdRef(tensor)
    return place, tensor.dtype, tuple(tensor.shape), tensor.device
