"""What `oasis-hf bench` prints of its record."""

from __future__ import annotations

import textwrap
from typing import Any

from ..config import DEFAULT_CAP


def fitted(text: str, width: int) -> str:
    """Lines no longer than the terminal; what one is too long for is indented below it."""
    return "\n".join(
        "\n".join(textwrap.wrap(part, width, subsequent_indent="    ", break_on_hyphens=False))
        for part in text.split("\n")
    )


def line(row: dict[str, Any]) -> str:
    """One row of the record, for people; several lines if it has a profile."""
    if "ceilings" in row:
        return _ceilings(row["ceilings"])
    if "prompt" in row:
        return _prompt(row)
    if "arm" not in row:
        return _examined(row)
    options = row["options"]
    apart = ("compile", "fetch_cap", "block_size")
    words = [str(v) for name, v in options.items() if name not in apart]
    if "block_size" in options:
        words.append(f"block {options['block_size']}")
    if options.get("fetch_cap", DEFAULT_CAP) != DEFAULT_CAP:
        words.append(f"cap {str(options['fetch_cap']).lower()}")
    if options.get("compile"):
        words.append("compiled")
    if row.get("drafts"):
        words.append(f"{row['drafts']} drafts at {row['acceptance']}")
    head = f"{_size(row)} {row['arm']:<9} {' '.join(words):<28}"
    if "error" in row:
        return f"{head} {row['error']}"
    text = (
        f"{head} {row['ms_p20']:7.2f} {row['ms_p50']:7.2f} {row['ms_p80']:7.2f} ms/step (p20 p50 "
        f"p80) {row['tokens_per_second']:8.0f} tok/s, floor {row['floor_ms']:6.2f} ms "
        f"(x{row['ratio_to_floor']:.2f}), {_gigabytes(row['peak_hbm_bytes'])}"
    )
    if "accepted_share" in row:
        text += (
            f", {row['accepted_share']:.0%} accepted, {row['tokens_per_round']:.2f} tokens a round"
        )
    if "stats" in row:
        stats = row["stats"]
        text += (
            f", turnover {stats['turnover']:.1%}, hits {stats['hit_rate']:.1%}, "
            f"{row['link_bytes_per_step'] / 1e6:.0f} MB/step over the link"
        )
    if "overlap" in row:
        text += f", exposed {row['exposed_ms']:.2f} ms, overlap {row['overlap']:.2f}"
    return f"{text}, warm-up {row['warm_up_seconds']:.1f} s"


def _size(row: dict[str, Any]) -> str:
    return f"B{row['batch']:<3} {row['tokens']:>7,}"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:5.1f} GB"


def _ceilings(ceilings: dict[str, Any]) -> str:
    gather = ceilings["gather"]
    return (
        f"ceilings: copy {ceilings['device_copy'] / 1e12:.2f} TB/s, link "
        f"{ceilings['link_copy'] / 1e9:.1f} GB/s, gather "
        f"{gather['bytes_per_second'] / 1e9:.1f} GB/s "
        f"({gather['bytes_per_second'] / ceilings['link_copy']:.0%}), beside compute "
        f"{gather['beside']:.2f} x the longer"
    )


def _prompt(row: dict[str, Any]) -> str:
    size = row["prefill_chunk_size"]
    pieces = "at once" if size is None else f"in pieces of {size:,}"
    head = f"prompt {row['tokens']:>7,} {row['prompt']:<6} {row['run']:<6} {pieces},"
    if "error" in row:
        return f"{head} {row['error']}"
    peak = _gigabytes(row["peak_hbm_bytes"])
    return f"{head} {row['seconds']:6.2f} s to the first token, peak {peak}"


def _examined(row: dict[str, Any]) -> str:
    """The memory of the last piece of a prompt, and the profile as a table."""
    text = f"{_size(row)} last {row['piece']:,} tokens of a prompt: "
    if "prompt_error" in row:
        text += row["prompt_error"]
    else:
        peak = _gigabytes(row["prompt_peak_hbm_bytes"]).strip()
        text += f"peak {peak}, {row['prompt_peak_ratio']:.2f} x predicted"
    kernels = [
        f"  {kernel['us']:9.1f} us {kernel['calls']:7.1f} calls {kernel['share']:6.1%}  "
        f"{kernel['name'][:80]}"
        for kernel in row.get("profile", ())
    ]
    return "\n".join([text, *kernels])
