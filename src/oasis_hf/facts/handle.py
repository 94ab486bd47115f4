"""How a cache layer reaches the attention function: through the tensors that `update` returns.

The attribute survives every model that leaves K and V alone between the two, K and V shared between
layers included; where it is lost, the model is one that this package cannot serve. A guard notices
an update whose attention never ran.
"""

import threading
from typing import Any

from torch import Tensor

HANDLE = "_oasis_layer"
BYPASS = (
    "the model does not use Transformers' attention interface, so attention 'oasis' never reaches "
    "it; load it with another attention implementation and another cache"
)
WITHHELD = (
    "the cache is withheld from the model's layers, as gradient checkpointing does in training "
    "mode: nothing would be remembered; call model.eval() or model.gradient_checkpointing_disable()"
)
_guard = threading.local()


class OasisUnsupportedError(RuntimeError):
    """A model, call or argument that this cache cannot serve; nothing was computed wrongly."""


class OasisLength(int):
    """A mask length that comes from this package's layers: tells the mask function who asks."""


def take_pending() -> Any:
    """The layer whose `update` ran last and whose attention has not run yet, or None; clears it."""
    layer = getattr(_guard, "pending", None)
    _guard.pending = None
    return layer


def never_attended(layer: Any) -> OasisUnsupportedError:
    """The error for a layer whose update ran and whose attention did not."""
    return OasisUnsupportedError(
        f"layer {layer.layer_idx}: cache.update() ran, but attention 'oasis' was not called; "
        "this model does not use Transformers' attention interface, or its attention "
        "implementation was changed. Use model.set_attn_implementation('oasis'), or another "
        "cache for this model"
    )


def attach(layer: Any, key: Tensor, value: Tensor) -> None:
    """Mark K and V as belonging to `layer`, whose attention must run next.

    Raises:
        OasisUnsupportedError: the attention of the layer before was not called.
    """
    missed = take_pending()
    if missed is not None:
        raise never_attended(missed)
    _guard.pending = layer
    setattr(key, HANDLE, layer)
    setattr(value, HANDLE, layer)


def layer_of(key: Tensor, value: Tensor) -> Any:
    """The layer that K and V were attached to, or None if either is not what `update` returned."""
    layer = getattr(key, HANDLE, None)
    return layer if getattr(value, HANDLE, None) is layer else None
