"""Where and with what a run was made."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .material.texts import source_name

PACKAGES = ("oasis-hf", "torch", "transformers", "datasets", "evaluate", "numpy")


def describe(model: Any) -> dict[str, Any]:
    """Versions, machine and model as plain values."""
    cuda = model.device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "model": Path(str(model.config._name_or_path)).name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(model.device) if cuda else "cpu",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def command(valued: Sequence[str] = (), flags: Sequence[str] = ()) -> str:
    """The command that runs, without what is particular to this machine.

    Args:
        valued: options that are left out together with their values.
        flags: options without a value that are left out.
    """
    words, given = [], iter(sys.argv[1:])
    for word in given:
        if word in valued:
            next(given, None)
        elif word not in flags and not word.startswith(tuple(f"{name}=" for name in valued)):
            words.append(source_name(word) if Path(word).is_absolute() else word)
    return shlex.join(["oasis-hf", *words])


def commit(source: Path = Path(__file__)) -> str:
    """The commit of the source, marked if files differ from it; "unknown" outside a checkout.

    An installed copy may lie in a checkout of something else, as environments often do: only a
    repository that tracks the file counts.
    """
    tracked = _git(source.parent, "ls-files", "--error-unmatch", source.name)
    found = _git(source.parent, "describe", "--always", "--dirty", "--exclude=*")
    return found if tracked and found else "unknown"


def _git(folder: Path, *words: str) -> str:
    """What a git command prints in `folder`; nothing where it fails or there is no git."""
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    if package == "oasis-hf":
        from oasis_hf import __version__

        return __version__
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
