"""What is compared: caches by the options that they get, written as one word."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import yaml

from oasis_hf.config import BLOCK, DEFAULT_CAP, INDEX_NAMES, OasisConfig
from oasis_hf.index import index_class

FORM = "expected dense, or INDEX/MISS/BUDGET[/OPTION=VALUE...], such as keys2bit/fetch/256"
ROUNDINGS = {f"dense/{dtype}": dtype for dtype in ("float32", "bfloat16", "float16")}
"""Dense attention of the same model in another type: the scale of what is harmless."""


@dataclass(frozen=True)
class Arm:
    """One cache that answers.

    Attributes:
        name: identifies it in results: "dense", or what `parse` reads.
        options: of `OasisCache`; none for the dense one.
        dtype: of the model, if it is another than the run's.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    dtype: str = ""

    @property
    def dense(self) -> bool:
        """Whether this is Transformers' own cache."""
        return not self.options

    @property
    def budget(self) -> int:
        """Tokens attended to per KV head, besides the tail; 0 for the dense arm."""
        return int(self.options.get("budget", 0))

    @property
    def family(self) -> str:
        """The name without the budget: what is one line in a plot."""
        return "/".join(part for part in self.name.split("/") if part != str(self.budget))


DENSE = Arm("dense")
PEER = re.compile(r"[a-z][\w.]*-[\w.]+/(\d+)")
"""An arm of another library: LIBRARY-METHOD/TOKENS, such as kvpress-snapkv/512."""


def is_peer(name: str) -> bool:
    """Whether an arm is another library's, which is only reported."""
    return PEER.fullmatch(name) is not None


def named(name: str) -> Arm:
    """The arm of a result; one of another library has no options but its tokens.

    Raises:
        ValueError: as `parse` does.
    """
    peer = PEER.fullmatch(name)
    return Arm(name, {"budget": int(peer[1])}) if peer else parse(name)


def parse(name: str) -> Arm:
    """Reads an arm such as "keys2bit/skip/512/fetch_cap=0.1".

    The index is one of the library's, or "module:Class" of your own. MISS is fetch, skip, or a
    share of the attention. "fetch" attends to just what the index chooses: it shows the selection
    itself, whatever moving blocks would cost. Unless given, `fetch_cap` is 0.05 and `block_size`
    16: the cache's own default follows the machine, which answers must not, and the index, which
    hides what indexes are worth. "dense/bfloat16" is dense attention in
    another type.

    Raises:
        ValueError: not of this form, or an option is unknown or refused; says which.
    """
    if name == DENSE.name:
        return DENSE
    if name in ROUNDINGS:
        return Arm(name, dtype=ROUNDINGS[name])
    parts = name.split("/")
    if len(parts) < 3:
        raise ValueError(f"arms: got {name!r}, {FORM}")
    index, miss, budget, *more = parts
    options: dict[str, Any] = {"index": _index(index), "on_miss": _value(miss, name)}
    options |= {"fetch_cap": DEFAULT_CAP, "block_size": BLOCK}
    for text in (f"budget={budget}", *more):
        key, equals, value = text.partition("=")
        if not equals or key not in OasisConfig.fields():
            raise ValueError(
                f"arms: got {key!r} in {name!r}, expected an option of OasisCache, one of "
                f"{', '.join(OasisConfig.fields())}"
            )
        options[key] = _value(value, name)
    try:
        OasisConfig(**options)
        index_class(options["index"])
    except (ValueError, TypeError) as error:
        raise ValueError(f"arms: got {name!r}: {error}") from error
    return Arm(name, options)


def _index(name: str) -> Any:
    """The name, or the class that "module:Class" names."""
    module, colon, cls = name.partition(":")
    if not colon:
        if name not in INDEX_NAMES:
            raise ValueError(
                f"arms: got index {name!r}, expected one of {', '.join(INDEX_NAMES)}, or "
                "module:Class of your own"
            )
        return name
    try:
        return getattr(import_module(module), cls)
    except Exception as error:
        # A module of the user's may fail in any way.
        raise ValueError(f"arms: index {name!r} cannot be imported: {error}") from error


def _value(text: str, name: str) -> Any:
    """The value of an option, as YAML reads it."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(
            f"arms: got {text!r} in {name!r}, expected a value such as 512, fetch or null"
        ) from error
