"""Chains: RULER's variable tracking, and a running total over many steps."""

from __future__ import annotations

import string
from itertools import pairwise

from ..material.words import made_up, numbers
from .hiding import filler, hidden, some_depths
from .parts import Draft, Scene, Turn


def variables(scene: Scene, hops: int = 4) -> Draft:
    """One chain of assignments, in order, in filler; all its variables are asked for."""
    names = made_up(scene.draw, hops + 1, 5, string.ascii_uppercase)
    (value,) = numbers(scene.draw, 1, digits=5)
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {new} = VAR {old}." for old, new in pairwise(names)]
    depths = some_depths(scene.draw, len(lines))
    turn = Turn(
        f"Which variables are assigned the value {value} in the text, directly or by way of "
        "others?",
        tuple(names),
        f"The {len(names)} variables that are assigned the value {value} are: ",
    )
    return Draft(hidden(filler, lines, depths), (turn,), 30, depths)


def running_total(scene: Scene, steps: int = 24) -> Draft:
    """Steps of a computation in real prose; every line of the long answer needs the one before."""
    total = scene.draw.randrange(10, 100)
    lines, totals = [f"Step 1: the total is set to {total}."], [total]
    for step in range(2, steps + 1):
        change = scene.draw.randrange(1, 10)
        if scene.draw.random() < 0.5 and totals[-1] > change:
            lines.append(f"Step {step}: {change} is taken from the total.")
            totals.append(totals[-1] - change)
        else:
            lines.append(f"Step {step}: {change} is added to the total.")
            totals.append(totals[-1] + change)
    depths = some_depths(scene.draw, steps)
    turn = Turn(
        f"The text holds {steps} numbered steps of a computation. Write one line for each step, "
        "in order, with the total after it.",
        tuple(f"Step {number}: {total}" for number, total in enumerate(totals, 1)),
    )
    return Draft(hidden(scene.prose, lines, depths), (turn,), 12 * steps, depths)
