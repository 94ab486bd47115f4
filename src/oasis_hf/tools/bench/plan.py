"""Which cases a benchmark runs, and in which order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...config import DEFAULT_CAP, OasisConfig

SIZES = ((1, 131072), (8, 32768), (8, 131072), (32, 32768))
"""Sequences, and tokens of context of each."""

QUICK = ((1, 8192),)
ROOM = 512
"""Tokens left free at the end of a context, so that a case never grows its capacity."""

WARM_UP = 5
"""Steps before the timed ones: the first fill, an eager step, compilation, capture."""

HEAT = 4.0
"""With this, some tenth of a choice changes from step to step."""

LOOKUP = "lookup"
"""The acceptance that is found, not set: by prompt lookup in a scripted text."""

ARMS = ("oasis", "dense", "static", "offloaded")
FITS = 262144
"""Most tokens whose full KV is held on the device beside the weights, 8B shape on one H200."""

FEW = {"dense": 20, "static": 20, "offloaded": 2}
"""Decode steps timed at most; an offloaded one moves the whole context both ways."""


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        batch: sequences.
        tokens: context of each.
        arm: "oasis", "dense" (DynamicCache), "static" (StaticCache, the step a CUDA graph) or
            "offloaded" (DynamicCache that Transformers offloads).
        options: choices of the `OasisCache`.
        steps: decode steps timed, or rounds.
        drafts: drafts of each sequence that a round verifies; 0 for plain decoding.
        acceptance: probability that a draft is accepted, or "lookup": drafts are looked up, and
            accepted where they are right.
        heat: how much some blocks are wanted by all queries, see `workload.heated_keys`.
        base: whether it is the case that the others of its size differ from by one choice; the
            memory of a prompt, and the profile, are taken for these alone.
    """

    batch: int
    tokens: int
    arm: str = "oasis"
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 40
    drafts: int = 0
    acceptance: float | str = 0.0
    heat: float = HEAT
    base: bool = False

    @property
    def compiled(self) -> bool:
        """Whether the model's own work is compiled into the graph."""
        return bool(self.options.get("compile"))


@dataclass(frozen=True)
class Choices:
    """Values of each option to try; the first is that of the base case.

    Attributes:
        budgets: tokens attended to per KV head; those after the first at the first size only.
        indexes: names of indexes.
        policies: "skip", "fetch" or a share of the attention.
        caps: values of `fetch_cap`; the base case's is 0.05 where that is among them.
        compile: whether to compile the model's own work.
        block_sizes: tokens per block; those after the first are measured with every budget and
            policy, as what fits a large budget may not fit a small one.

    Raises:
        ValueError: an option has no value, one that `OasisCache` refuses, or a cap that would
            change nothing.
    """

    budgets: tuple[int, ...] = (2048, 512)
    indexes: tuple[str, ...] = ("keys2bit", "minmax")
    policies: tuple[str | float, ...] = ("skip", "fetch")
    caps: tuple[str | float | None, ...] = (DEFAULT_CAP,)
    compile: tuple[bool, ...] = (False, True)
    block_sizes: tuple[int | str, ...] = (OasisConfig.block_size,)

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if not values:
                raise ValueError(f"{name}: got no value, expected at least one")
        for cap in self.caps:
            OasisConfig(fetch_cap=cap)
        for size in self.block_sizes:
            OasisConfig(budget=min(self.budgets), block_size=size)
        for options in self.options(all_budgets=True):
            OasisConfig(**options)
        if len(self.caps) > 1 and self.policies[0] == "fetch":
            raise ValueError(
                f"caps: got {len(self.caps)} of them beside the policy 'fetch', which fetches "
                "nothing in the background; expected another policy first, such as skip,fetch"
            )

    @property
    def base_cap(self) -> str | float | None:
        """The cap of the base case."""
        return DEFAULT_CAP if DEFAULT_CAP in self.caps else self.caps[0]

    def options(self, all_budgets: bool) -> list[dict[str, Any]]:
        """The base, then all that differ from it by one choice."""
        base = {
            "budget": self.budgets[0],
            "index": self.indexes[0],
            "on_miss": self.policies[0],
            "fetch_cap": self.base_cap,
            "compile": self.compile[0],
        }
        if self.block_sizes != (OasisConfig.block_size,):
            base["block_size"] = self.block_sizes[0]
        others: dict[str, tuple[Any, ...]] = {
            "on_miss": self.policies[1:],
            "fetch_cap": tuple(cap for cap in self.caps if cap != self.base_cap),
            "index": self.indexes[1:],
            "budget": self.budgets[1:] if all_budgets else (),
            "compile": self.compile[1:],
        }
        changed = [base | {name: value} for name, values in others.items() for value in values]
        changed += [
            options | {"block_size": size}
            for size in self.block_sizes[1:]
            for options in (base, *changed)
            if all(options[name] == base[name] for name in ("index", "fetch_cap", "compile"))
        ]
        return [_without_false(options) for options in (base, *changed)]


def _drafts_too(options: dict[str, Any], base: dict[str, Any]) -> bool:
    """Whether a case is also run with drafts: the base, what is done about misses, compiled."""
    if options.get("compile") != base.get("compile"):
        return True
    policies = options["on_miss"] != base["on_miss"] or options["fetch_cap"] == 0
    return policies or options == base


def _without_false(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not False}


def plan(
    sizes: Iterable[tuple[int, int]],
    arms: Iterable[str],
    choices: Choices,
    steps: int,
    drafts: int = 0,
    acceptances: Iterable[float | str] = (),
) -> list[Case]:
    """The cases, those of one batch size together and its compiled ones last.

    Args:
        sizes: batch and context of each size.
        arms: of `ARMS`; those that hold the full KV on the device are left out where it cannot
            fit, the offloaded one is run with one sequence.
        choices: what to try of the `OasisCache`.
        steps: decode steps timed.
        drafts: drafts of a round; 0 for none.
        acceptances: probabilities that a draft is accepted, or "lookup"; each a case beside the
            base, its other policies, the one without lookahead (`fetch_cap` 0) and the compiled
            one.

    Raises:
        ValueError: an unknown arm, drafts that a verification cannot take, or no probability.
    """
    arms, cases, acceptances = list(arms), [], list(acceptances)
    if not 0 <= drafts < OasisConfig.max_rows:
        raise ValueError(
            f"drafts: got {drafts}, expected 0 to {OasisConfig.max_rows - 1}, the rows of a "
            "verification less one"
        )
    for share in acceptances:
        if share != LOOKUP and (isinstance(share, str) or not 0 <= share <= 1):
            raise ValueError(
                f"acceptance: got {share}, expected {LOOKUP} or a probability from 0 to 1"
            )
    if unknown := set(arms) - set(ARMS):
        raise ValueError(f"arms: got {', '.join(sorted(unknown))}, expected of {', '.join(ARMS)}")
    for number, (batch, context) in enumerate(sizes):
        tokens = context - ROOM
        if "oasis" in arms:
            tried = choices.options(all_budgets=number == 0)
            for place, options in enumerate(tried):
                cases.append(Case(batch, tokens, "oasis", options, steps, base=place == 0))
                if drafts and _drafts_too(options, tried[0]):
                    cases += [
                        Case(batch, tokens, "oasis", options, steps, drafts, share)
                        for share in acceptances
                    ]
        for arm in arms:
            fits = batch == 1 if arm == "offloaded" else batch * context <= FITS
            if arm != "oasis" and fits:
                cases.append(Case(batch, tokens, arm, steps=min(steps, FEW[arm])))
    return sorted(cases, key=lambda case: (case.batch, case.compiled))
