"""Linear modules that read the same input, as one product.

Decoding reads every weight once for a few rows, so a product takes what its bytes take, if it is
large enough. Those of q, k and v of a model with grouped heads are not: three small products and
the sums of their parts take twice the time of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

FAMILIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of Transformers' modules that read one input, in the order in which they are called."""


class MergedLinear:
    """One family of linear modules, whose weights lie side by side in memory.

    The modules keep their parameters, which become views of the common memory: the model takes no
    more of it, and is saved, loaded and called as before. Within a `with` block their forward is
    one product: whichever module is called first computes all, the others take their part. Between
    these calls nothing may be written into the input.

    Args:
        modules: what `mergeable` says can be merged.

    Attributes:
        moved: whether weights were moved. What has their addresses, such as a captured graph, is
            stale then.
    """

    def __init__(self, modules: list[nn.Linear]) -> None:
        self.modules = modules
        self._weight, self.moved = _side_by_side([module.weight for module in modules])
        self._bias: Tensor | None = None
        biases = [module.bias for module in modules if module.bias is not None]
        if biases:
            self._bias, moved = _side_by_side(biases)
            self.moved |= moved
        self._sizes = [module.out_features for module in modules]
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = [None] * len(modules)

    def __enter__(self) -> None:
        """The modules' forward is one product from here."""
        for place, module in enumerate(self.modules):
            # A function of its own for each would be compiled for each: this is one for all.
            vars(module).update(oasis_part=(self, place), forward=MethodType(_forward, module))

    def __exit__(self, *_: object) -> None:
        """The modules' own forward again."""
        for module in self.modules:
            vars(module).pop("forward", None)
            vars(module).pop("oasis_part", None)
        # What was not asked for, as where only some of the modules were called, is not kept.
        self._input, self._parts = None, [None] * len(self.modules)

    def part(self, place: int, x: Tensor) -> Tensor:
        """Output of one module for `x` `[..., in]`."""
        part = self._parts[place]
        if part is None or self._input is not x:
            outputs = nn.functional.linear(x, self._weight, self._bias)
            self._input, self._parts = x, list(outputs.split(self._sizes, -1))
            part = self._parts[place]
            assert part is not None
        # Each is handed out once: a module that is called again computes anew.
        self._parts[place] = None
        if all(left is None for left in self._parts):
            self._input = None
        return part


def _forward(module: Any, x: Tensor) -> Tensor:
    return module.oasis_part[0].part(module.oasis_part[1], x)


def merge(layer: nn.Module) -> list[MergedLinear]:
    """Every family within a decoder layer that can be merged."""
    found = []
    for module in layer.modules():
        for names in FAMILIES:
            family: list[Any] = [getattr(module, name, None) for name in names]
            if mergeable(family):
                found.append(MergedLinear(family))
    return found


def mergeable(family: list[Any]) -> bool:
    """Whether all are plain linear modules of one kind, with weights of their own.

    Adapters, quantised or sharded weights, and modules whose forward someone has replaced are not.
    """
    # A subclass may compute anything.
    if not all(type(module) is nn.Linear for module in family):
        return False
    if any("forward" in vars(module) for module in family):
        return False
    if len({module.bias is None for module in family}) > 1:
        return False
    parameters = [x for module in family for x in module.parameters(recurse=False)]
    if not all(type(x) is nn.Parameter and x.is_contiguous() for x in parameters):
        return False
    # Weights of one kind, and biases of one kind if there are any.
    kinds = {(x.dtype, x.device, x.requires_grad, x.shape[1:]) for x in parameters}
    return len(kinds) == (1 if family[0].bias is None else 2)


def _side_by_side(parameters: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """All of them as one tensor, after moving them if need be; and whether they were moved."""
    first, rows = parameters[0], sum(len(x) for x in parameters)
    place = first.data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != place or not _one_storage(first, parameter):
            break
        place += parameter.nbytes
    else:
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride()), False
    common = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, common.split([len(x) for x in parameters]), strict=True):
        parameter.data = part
    return common, True


def _one_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
