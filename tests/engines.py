"""Which engines a test runs on: both, wherever tests run.

On a GPU both run there. Without one the Triton engine runs in Triton's interpreter, where a step of
one KV head takes a tenth of a second: it gets few and small cases.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import Driver

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


@dataclass(frozen=True)
class Engine:
    """An engine and where it runs.

    Attributes:
        backend: "reference" or "triton".
        small: whether it is interpreted.
    """

    backend: str
    small: bool

    def driver(self, **options: Any) -> Driver:
        """A driver of its layers; with one KV head where every head counts."""
        heads = {"heads": 2, "kv_heads": 1} if self.small else {}
        return Driver(device=DEVICE, backend=self.backend, **heads | options)

    def pick(self, whole: Any, few: Any) -> Any:
        """One of two, the second where it is interpreted."""
        return few if self.small else whole


REFERENCE, TRITON = Engine("reference", False), Engine("triton", not GPU)
INSTALLED = importlib.util.find_spec("triton") is not None


def _patch_once() -> None:
    """Have Triton's interpreter replace the language's functions once a kernel.

    It does so anew in each function that a kernel calls, which takes a quarter of its time and
    changes nothing: they are replaced already.
    """
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def once(function: Any) -> Any:
        used = [x for x in (language, language.core) if x in function.__globals__.values()]
        if any(language.core.is_builtin(part.load) for part in used):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once


if INSTALLED and not GPU:
    _patch_once()


def on_engines(names: str, whole: list[Any], few: list[Any]) -> pytest.MarkDecorator:
    """Parametrise with `engine` and `names`.

    Args:
        names: arguments besides `engine`, as for `pytest.mark.parametrize`.
        whole: their values, on the reference engine and on a GPU.
        few: those in the interpreter.
    """
    skip = pytest.mark.skipif(not INSTALLED, reason="needs triton")
    cases = [("torch", REFERENCE, value, ()) for value in whole]
    cases += [(TRITON.backend, TRITON, value, skip) for value in TRITON.pick(whole, few)]
    many = "," in names
    return pytest.mark.parametrize(
        f"engine,{names}",
        [
            pytest.param(
                engine,
                *(value if many else [value]),
                marks=marks,
                id="-".join([name, *map(_text, value if many else [value])]),
            )
            for name, engine, value, marks in cases
        ],
    )


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(str(part) for part in value.values()) or "default"
    return str(value)
