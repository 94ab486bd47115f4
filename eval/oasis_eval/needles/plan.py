"""Which arms are compared over indexes, policies and budgets."""

from __future__ import annotations

from collections.abc import Iterable

from oasis_hf.index import index_class

from ..arms import Arm, parse

BASELINES = ("mean", "streaming")
BOUND = "oracle"


def plan(
    indexes: Iterable[str],
    policies: Iterable[str],
    budgets: Iterable[int],
    every: bool = False,
    options: str = "",
) -> list[Arm]:
    """The arms to run.

    Every index ranks at every budget with misses fetched: then its choice is all that counts. The
    other policies are run for the indexes that someone would use, the thresholds only where the
    index estimates mass. With `every`, all combinations that exist.

    Args:
        indexes: names, or "module:Class" of one's own.
        policies: "fetch", "skip", or a share of the attention.
        budgets: tokens per KV head.
        every: all combinations that exist.
        options: more of them, as an arm has them: "block_size=8/head_room=1".

    Raises:
        ValueError: an arm cannot be read; says which part of it.
    """
    budgets = sorted(budgets)
    arms = []
    for index in indexes:
        for policy in policies:
            few = not every and _few(index, policy)
            chosen = budgets[1::2] if few and len(budgets) > 2 else budgets
            names = ("/".join(filter(None, (index, policy, str(b), options))) for b in chosen)
            found = [parse(name) for name in names]
            if found and _worth(index, policy, every, found[0]):
                arms += found
    return arms


def _few(index: str, policy: str) -> bool:
    """Whether some of the budgets say enough."""
    return index in BASELINES or (policy == "skip" and index != "keys2bit")


def _worth(index: str, policy: str, every: bool, arm: Arm) -> bool:
    """Whether an index is run with a policy."""
    if policy in ("fetch", "skip"):
        return every or policy == "fetch" or index not in (*BASELINES, BOUND)
    mass = index_class(arm.options["index"]).estimates_mass
    return mass and (every or index not in (*BASELINES, BOUND))
