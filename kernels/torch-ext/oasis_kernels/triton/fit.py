"""Whether the tensors of a launch agree with each other: checked on the host, before it.

A kernel computes addresses from the sizes that it is given. A buffer of another batch, head count,
capacity or type would be read or written past its end, which no one notices until another tensor
turns out to be changed. So each launch compares all of its tensors with what follows from one of
them. It looks at shapes only, and waits for no device.
"""

import torch
from torch import Tensor

INT32, INT64, BYTE, FLAG = torch.int32, torch.int64, torch.uint8, torch.bool
FLOAT32 = torch.float32

Wanted = tuple[str, Tensor, tuple[int, ...], torch.dtype]
"""Name of an argument, the tensor, its shape (-1: any) and its type."""


def check(launch: str, device: torch.device, *arguments: Wanted) -> None:
    """Compare tensors with what a launch will take them for.

    Args:
        launch: name of the function, for the message.
        device: where all of them must be.
        arguments: name, tensor, expected shape (-1 for any extent) and type of each.

    Raises:
        ValueError: one of them differs, or is not contiguous; nothing was launched.
    """
    for name, tensor, shape, dtype in arguments:
        got = tensor.shape
        if (
            (got != shape and not _matches(got, shape))
            or tensor.dtype is not dtype
            or tensor.device != device
            or not tensor.is_contiguous()
        ):
            raise _unfit(launch, name, tensor, shape, dtype, device)


def unmet(launch: str, what: str) -> ValueError:
    """The error of a launch whose sizes do not have the relation that it needs."""
    return ValueError(f"{launch}: expected {what}; nothing was launched")


def _matches(got: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(got) == len(shape) and all(
        want in (-1, have) for have, want in zip(got, shape, strict=True)
    )


def _unfit(
    launch: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> ValueError:
    layout = "contiguous" if tensor.is_contiguous() else f"strides {tensor.stride()}"
    return ValueError(
        f"{launch}: {name}: got {tuple(tensor.shape)} {tensor.dtype} on {tensor.device} ({layout}),"
        f" expected {shape} {dtype} on {device} (contiguous), by the other arguments; it belongs "
        "to another batch, model or capacity, and nothing was launched"
    )
