"""The `oasis-hf` script: what has to happen before torch is loaded. Only the standard library."""

from __future__ import annotations

import os

from .pulse import Pulse

COMPLETION = "_OASIS_HF_COMPLETE"
"""Set by shells that ask for completions, and want no other output."""


def wait_quietly() -> None:
    """Have OpenMP's threads sleep while they wait for one another, unless the user chose.

    By default they spin. Where other processes want the cores too, threads then spin away the time
    that the one they wait for needs, and a step takes up to a hundred times as long. OpenMP reads
    this once, when torch is loaded.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def main() -> None:
    """Run the command line."""
    wait_quietly()
    with Pulse(quiet=COMPLETION in os.environ) as pulse:
        pulse.say("oasis-hf: loading torch and Transformers", after=1.5)
        from oasis_hf.cli import app
    app(prog_name="oasis-hf")
