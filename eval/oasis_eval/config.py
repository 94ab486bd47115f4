"""What a run does: defaults, then a preset, then a YAML file, then flags."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from .arms import DENSE, Arm, parse
from .tasks import LANGUAGE, RECALL, RULER, TASKS

GROUPS = {"ruler": tuple(RULER), "all": tuple(LANGUAGE), "recall": tuple(RECALL)}
"""Names that stand for several tasks."""


class ConfigError(ValueError):
    """A choice that cannot be used; the message names it and the way out."""


@dataclass(frozen=True)
class EvalConfig:
    """Choices of a run; all of them decide what is answered.

    Attributes:
        model: a Hub id or a folder; the packaged SmolLM2-135M-Instruct if empty.
        dtype: "float32" or "bfloat16"; what the machine is fast in if empty.
        tasks: names of tasks, or "ruler" or "all", or "recall" for the small retrieval model.
        contexts: tokens of prompt and answers together.
        arms: as `arms.parse` reads them; dense is always among them.
        samples: of every task at every context.
        seed: of everything that is drawn.
        text: real text: "reference", "austen", "essays" or a file; the best there is if empty.
        answer_tokens: most tokens of any answer, and of any text that is scored: a number, or
            numbers by task; None, and for tasks without a number, each task's own.
    """

    model: str = ""
    dtype: str = ""
    tasks: tuple[str, ...] = ("ruler",)
    contexts: tuple[int, ...] = (4096,)
    arms: tuple[str, ...] = ("dense", "keys2bit/fetch/512", "streaming/fetch/512")
    samples: int = 8
    seed: int = 0
    text: str = ""
    answer_tokens: int | dict[str, int] | None = None

    def __post_init__(self) -> None:
        tasks = [name for given in self.tasks for name in GROUPS.get(given, (given,))]
        for name in tasks:
            if name not in TASKS:
                raise ConfigError(
                    f"tasks: got {name!r}, expected some of {', '.join([*GROUPS, *TASKS])}"
                )
        try:
            arms = [parse(name) for name in (DENSE.name, *self.arms)]
        except ValueError as error:
            raise ConfigError(str(error)) from error
        others = [name for name in tasks if TASKS[name].metric != "drift"]
        for arm in arms:
            if arm.dtype and others:
                raise ConfigError(
                    f"arms: got {arm.name!r}, which only long_output compares; leave it out, or "
                    f"{', '.join(others)}"
                )
        for key, values in (("contexts", self.contexts), ("tasks", tasks)):
            if not values:
                raise ConfigError(f"{key}: got none, expected at least one")
        for count in self.contexts:
            if count < 256:
                raise ConfigError(f"contexts: got {count}, expected 256 tokens or more")
        if self.samples < 1:
            raise ConfigError(f"samples: got {self.samples}, expected 1 or more")
        self._check_answer_tokens()
        if self.dtype not in ("", "float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype: got {self.dtype!r}, expected float32, bfloat16 or float16")
        object.__setattr__(self, "tasks", tuple(dict.fromkeys(tasks)))
        object.__setattr__(self, "arms", tuple(dict.fromkeys(arm.name for arm in arms)))

    def _check_answer_tokens(self) -> None:
        given = self.answer_tokens
        for task, tokens in given.items() if isinstance(given, dict) else [("", given)]:
            if task and task not in TASKS:
                raise ConfigError(f"answer_tokens: got task {task!r}, expected some of {[*TASKS]}")
            if tokens is not None and tokens < 1:
                raise ConfigError(f"answer_tokens: got {tokens}, expected 1 or more")

    def limit(self, task: str, own: int) -> int:
        """Most tokens of an answer, for a task whose own limit is given."""
        given = self.answer_tokens
        most = given.get(task) if isinstance(given, dict) else given
        return min(own, most or own)

    @property
    def parsed_arms(self) -> list[Arm]:
        """The arms, the dense one first."""
        return [parse(name) for name in self.arms]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    @property
    def digest(self) -> str:
        """A short hash: answers of equal configs belong together."""
        text = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "tasks": ["niah_single_2", "language"],
        "contexts": [1024],
        "arms": ["keys2bit/fetch/128", "streaming/fetch/128"],
        "samples": 2,
        "answer_tokens": 16,
    },
    "smoke": {
        "tasks": ["niah_single_2", "niah_multikey_1", "ask_again", "language"],
        "contexts": [1024],
        "arms": [
            *(f"keys2bit/fetch/{budget}" for budget in (64, 128)),
            "minmax/fetch/128",
            "streaming/fetch/128",
        ],
        "samples": 3,
        "answer_tokens": 12,
    },
    "ruler": {
        "tasks": ["ruler"],
        "contexts": [4096, 8192],
        "arms": [f"keys2bit/fetch/{budget}" for budget in (256, 512, 1024, 2048)]
        + ["minmax/fetch/512", "streaming/fetch/512"],
        "samples": 25,
    },
    "long": {
        "tasks": ["ruler", "needles_11", "extraction", "ask_again", "language"],
        "contexts": [32768, 131072],
        "arms": [f"keys2bit/{miss}/2048" for miss in ("fetch", "skip")]
        + ["keys2bit/fetch/512", "streaming/fetch/2048"],
        "samples": 20,
    },
    "paper": {
        "tasks": ["all"],
        "contexts": [8192, 32768],
        "arms": [
            f"keys2bit/{miss}/{budget}"
            for budget in (256, 512, 1024, 2048, 4096)
            for miss in ("fetch", "skip")
        ]
        + [f"keys2bit/skip/2048/fetch_cap={cap}" for cap in ("0.01", "0.02", "0.1", "0.2", "null")]
        + ["minmax/skip/2048", "oracle/fetch/2048", "streaming/fetch/2048"],
        "samples": 50,
    },
}
"""Named sets of choices."""


def resolve(
    preset: str | None = None,
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
) -> EvalConfig:
    """The config of a run: defaults < preset < file < flags.

    Args:
        preset: one of `PRESETS`; the file may name one too.
        file: YAML with the fields of `EvalConfig`, and maybe "preset".
        flags: fields given on the command line; None where they were not.

    Raises:
        ConfigError: a key is unknown or a value unusable; the message names it.
    """
    given = _read(file) if file else {}
    preset = preset or given.pop("preset", None)
    given.pop("preset", None)
    if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
        raise ConfigError(f"preset: got {preset!r}, expected one of {', '.join(PRESETS)}")
    chosen = dict(PRESETS[preset]) if preset else {}
    chosen |= given | {key: value for key, value in (flags or {}).items() if value is not None}
    known = {field.name for field in fields(EvalConfig)}
    for key in chosen:
        if key not in known:
            raise ConfigError(
                f"{key}: unknown key{f' in {file}' if file else ''}; expected some of "
                f"{', '.join([*sorted(known), 'preset'])}"
            )
    return EvalConfig(**{key: _typed(key, value) for key, value in chosen.items()})


def _read(file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config: {file} cannot be read: {error}") from error
    if not isinstance(found or {}, dict):
        raise ConfigError(f"config: {file} holds no keys with values")
    return dict(found or {})


def _typed(key: str, value: Any) -> Any:
    """A value as its field wants it; lists may be written as one word."""
    if key in ("tasks", "arms", "contexts"):
        values = value.split(",") if isinstance(value, str) else value
        values = values if isinstance(values, list | tuple) else [values]
        texts = [str(part).strip() for part in values if str(part).strip()]
        return tuple(_whole(key, text) for text in texts) if key == "contexts" else tuple(texts)
    if key == "answer_tokens" and isinstance(value, dict):
        return {str(task): _whole(key, tokens) for task, tokens in value.items()}
    if key in ("samples", "seed") or (key == "answer_tokens" and value is not None):
        return _whole(key, value)
    if key in ("model", "dtype", "text") and not isinstance(value, str):
        raise ConfigError(f"{key}: got {value!r}, expected a text")
    return value


def _whole(key: str, value: Any) -> int:
    try:
        if isinstance(value, bool) or int(value) != float(value):
            raise ValueError
    except (OverflowError, TypeError, ValueError):
        raise ConfigError(f"{key}: got {value!r}, expected a whole number") from None
    return int(value)
