"""Checks of options before any work: each raises a `Mistake` that names the option."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from .errors import Failure, Mistake, mistake

T = TypeVar("T")
REACH = 15
"""Seconds that the Hub has to say whether it knows a model."""


def words(option: str, text: str, known: Iterable[str] | None = None) -> tuple[str, ...]:
    """The words of a list with commas, at least one, each of them known.

    Args:
        option: its name, for the error.
        text: its value.
        known: words that may be there; None for any.
    """
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    expected = "at least one word" if known is None else f"some of {', '.join(known)}"
    if not found:
        raise mistake(option, text, f"{expected}, with commas between")
    for word in found:
        if known is not None and word not in known:
            raise mistake(option, word, expected)
    return found


def numbers(option: str, text: str, least: int, multiple: int = 1) -> tuple[int, ...]:
    """The whole numbers of a list with commas, at least one, each `least` or more."""
    expected = f"tokens, {least} or more" + (f", a multiple of {multiple}" * (multiple > 1))
    found = []
    for word in words(option, text):
        value = int(word) if word.isascii() and word.isdecimal() else -1
        if value < least:
            raise mistake(option, word, expected)
        if value % multiple:
            low = value // multiple * multiple
            raise mistake(option, word, f"{expected}; use {low} or {low + multiple}")
        found.append(value)
    return tuple(found)


def each(option: str, values: Iterable[str], read: Callable[[str], T]) -> tuple[T, ...]:
    """Every value as `read` reads it, whose `ValueError` becomes the option's."""
    found = []
    for value in values:
        try:
            found.append(read(value))
        except ValueError as error:
            # The library names its argument, such as "predictor: got ...".
            name, colon, rest = str(error).partition(": ")
            text = rest if colon and name.isidentifier() else str(error)
            raise Mistake(f"{option}: {text}") from error
    return tuple(found)


def output_file(option: str, path: Path | None) -> None:
    """That a file can be written there, before it takes an hour to have something to write."""
    if path is None:
        return
    if path.is_dir():
        raise mistake(option, path, "a file; that is a folder, name a file in it")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise mistake(option, path, "a file that can be written; choose another one")
    else:
        _writable(option, path.parent)


def output_folder(option: str, path: Path) -> None:
    """That a folder can be made there, and files in it."""
    if path.exists() and not path.is_dir():
        raise mistake(option, path, "a folder; that is a file, name another place")
    _writable(option, path)


def _writable(option: str, folder: Path) -> None:
    """That the nearest folder that exists is one, and can be written to."""
    for place in (folder, *folder.absolute().parents):
        if place.exists():
            if not place.is_dir():
                raise mistake(option, folder, f"a place in a folder; {place} is a file")
            if not os.access(place, os.W_OK | os.X_OK):
                raise mistake(option, folder, f"a place that can be written; {place} can not")
            return


def input_text(option: str, path: Path) -> str:
    """The text of a file, which must have some."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise mistake(option, path, f"a text file that can be read ({error.strerror})") from error
    if not text.strip():
        raise mistake(option, path, "a text file with some text in it; that one is empty")
    return text


def model_source(option: str, name: str | None) -> str | Path | None:
    """A folder or a Hub id; None for the packaged model. Looks for it, and loads nothing.

    Raises:
        Mistake: there is none of that name.
        Failure: the Hub cannot be reached.
    """
    if not name:
        return None
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    expected = "a folder with a model, or the id of a model on the Hub, such as owner/name"
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return name
        HfApi().model_info(name, timeout=REACH)
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise mistake(option, name, f"{expected}; there is none of that name") from error
    except Exception as error:
        raise Failure(
            f"{option}: got {name!r}, which is no folder here and is not in the Hub's cache, and "
            f"the Hub cannot be asked ({_brief(error)}); expected {expected}; connect to it, or "
            "name a folder"
        ) from error
    return name


def found_model(
    option: str, name: str | None, tell: Callable[[str], None], cache_dir: Path | None = None
) -> str | Path:
    """A folder or a Hub id; the packaged model, converted when it is first asked for, if unnamed.

    Args:
        option: its name, for the error.
        name: its value.
        tell: is told of each stage of the conversion.
        cache_dir: where converted models are; the usual place by default.

    Raises:
        Mistake: there is no model of that name.
        Failure: what the packaged model needs is not installed, or the Hub cannot be reached.
    """
    from ..tools import packaged

    source = model_source(option, name)
    if source is not None:
        return source

    def stage(done: int, total: int, what: str) -> None:
        tell(f"SmolLM2, first time only: {what} ({min(done + 1, total)} of {total})")

    try:
        return packaged.smollm2(cache_dir, progress=stage)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        raise Failure(str(error)) from error


def model_parts(option: str, name: str | None, tell: Callable[[str], None]) -> tuple[Any, Any]:
    """The config and the tokenizer of a model, the packaged one if it has no name; no weights."""
    source = found_model(option, name, tell)
    return model_config(option, source), tokenizer(option, source)


def model_config(option: str, source: str | Path) -> Any:
    """The config of a model that an `OasisCache` serves, with attention "oasis"; no weights.

    Raises:
        Mistake: there is no config, or the model cannot be served, with the reason.
    """
    from transformers import AutoConfig

    from ..layers.served import refusal

    try:
        config = AutoConfig.from_pretrained(source, attn_implementation="oasis")
    except Exception as error:
        raise mistake(
            option, str(source), f"a model that Transformers can load ({_brief(error)})"
        ) from error
    reason = refusal(config)
    if reason is not None:
        raise mistake(option, str(source), f"a model that the cache serves; {reason}")
    return config


def tokenizer(option: str, source: str | Path) -> Any:
    """The tokenizer of a model, a fast one."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(source, padding_side="left")
    except Exception as error:
        raise mistake(option, str(source), f"a model with a tokenizer ({_brief(error)})") from error
    if not found.is_fast:
        raise mistake(option, str(source), "a model whose tokenizer is a fast one")
    return found


def device(option: str, name: str) -> None:
    """That torch has a device of this name, by making something there."""
    import torch

    try:
        torch.empty(1, device=name)
    except Exception as error:
        raise mistake(
            option, name, f"a device of this machine, such as cpu or cuda ({_brief(error)})"
        ) from error


def positions(config: Any) -> int | None:
    """Positions that a model has, or None where its config does not say."""
    text = config.get_text_config(decoder=True)
    found = getattr(text, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def fits(most: int | None, options: str, tokens: int, way: str) -> None:
    """That a text and what is generated after it have positions in the model.

    Args:
        most: the model's positions, None where they are not known.
        options: those that the tokens come from.
        tokens: how many there are.
        way: what to do.
    """
    if most is not None and tokens > most:
        raise Mistake(
            f"{options}: got {tokens:,} tokens in all, expected at most {most:,}, the positions "
            f"that the model has; {way}"
        )


def _brief(error: Exception) -> str:
    """An error in one short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else f"{text[:157]}..."
