"""What the site does beyond Markdown.

Pages are written so that their links work in a checkout. The site also shows a few pages that stand
elsewhere in the repository (`ELSEWHERE`), and the reports and plots of `eval/results`; links to
them are set right here. Links to other files of the repository go to its web page where
`repo_url` names one, and are plain text otherwise. A link to a file that does not exist is a
warning, which `mkdocs build --strict` takes for an error; so is anything that a browser would load
from another host.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
LOG = logging.getLogger("mkdocs.hooks.oasis")

ELSEWHERE = {
    "DESIGN.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "eval/README.md": "results/commands.md",
}
"""Pages outside of `docs/`, and where the site has them."""
RESULTS = "eval/results"
STATUSES = ("exact", "delegated in part", "refused", "not testable", "WRONG")
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]*)(#[^)\s]*)?(\))")
EXTERNAL = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//"
    r"|<link[^>]*\srel=[\"']?(?:stylesheet|preload|icon)[^>]*\shref=[\"']?(?:https?:)?//"
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and plots that stand outside of `docs/`."""
    found = {name: ROOT / name for name in ELSEWHERE}
    for path in sorted((ROOT / RESULTS).rglob("*")):
        if path.suffix in (".md", ".svg"):
            found[path.relative_to(ROOT).as_posix()] = path
    for name, path in found.items():
        uri = ELSEWHERE.get(name, name)
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Set links right, and put tables in their places."""
    if "<!-- models -->" in markdown:
        markdown = markdown.replace("<!-- models -->", models_table())
    source = Path(page.file.abs_src_path)
    here = page.file.src_uri

    def replace(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups()
        if not target or ":" in target:
            return match[0]
        return _link(before, target, anchor or "", after, source, here, config)

    return "".join(part if code else LINK.sub(replace, part) for code, part in _parts(markdown))


def _parts(markdown: str) -> Iterator[tuple[bool, str]]:
    """The text in pieces, each with whether it is a block of code."""
    for number, part in enumerate(re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)):
        yield number % 2 == 1, part


def _link(
    before: str, target: str, anchor: str, after: str, source: Path, here: str, config: Any
) -> str:
    path = (source.parent / target).resolve()
    if not path.exists():
        LOG.warning("%s: there is no %s", source.relative_to(ROOT), target)
        return before + target + anchor + after
    name = path.relative_to(ROOT).as_posix()
    if name in ELSEWHERE:
        uri = ELSEWHERE[name]
    elif name.startswith("docs/") and not name.startswith("docs/tools/"):
        uri = name.removeprefix("docs/")
    elif name.startswith(RESULTS) and path.suffix in (".md", ".svg"):
        uri = name
    elif config.repo_url:
        return f"{before}{config.repo_url.rstrip('/')}/blob/main/{name}{anchor}{after}"
    else:
        return before.removesuffix("](").removeprefix("[")
    return before + os.path.relpath(uri, os.path.dirname(here) or ".") + anchor + after


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse what a browser would load from another host."""
    if found := EXTERNAL.search(output):
        LOG.warning("%s: loads from another host: %s", page.file.src_uri, found[0])
    return output


# ---- the support matrix --------------------------------------------------------------------------


def models_table() -> str:
    """Verdicts by model type, from what `oasis-hf models --json` wrote for each release."""
    runs = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / RESULTS).glob("models-*.json"))
    ]
    versions = [run["versions"]["transformers"] for run in runs]
    verdicts: dict[str, dict[str, dict[str, Any]]] = {}
    for version, run in zip(versions, runs, strict=True):
        for row in run["models"]:
            verdicts.setdefault(row["model_type"], {})[version] = row
    parts = [_counts(runs, versions)]
    for status in STATUSES:
        # A type stands where the newest release that has it puts it.
        found = [
            rows
            for _, rows in sorted(verdicts.items())
            if rows[max(rows, key=versions.index)]["status"] == status
        ]
        if found:
            parts.append(f"## {status.capitalize()}\n\n" + _types(found, versions, status))
    return "\n\n".join(parts)


def _counts(runs: list[dict[str, Any]], versions: list[str]) -> str:
    lines = ["| Transformers | " + " | ".join(name.lower() for name in STATUSES) + " |"]
    lines.append("| --- |" + " --: |" * len(STATUSES))
    for version, run in zip(versions, runs, strict=True):
        counts = Counter(row["status"] for row in run["models"])
        lines.append(f"| {version} | " + " | ".join(str(counts[name]) for name in STATUSES) + " |")
    return "\n".join(lines)


def _types(found: list[dict[str, dict[str, Any]]], versions: list[str], status: str) -> str:
    lines = ["| model type | class | Transformers | remark |", "| --- | --- | --- | --- |"]
    for rows in found:
        newest = rows[max(rows, key=versions.index)]
        cells = [_version_cell(version, rows.get(version), status) for version in versions]
        shown = ", ".join(cell for cell in cells if cell)
        remark = newest["detail"]
        if status == "delegated in part":
            split = f"{newest['offloaded']} of {newest['offloaded'] + newest['native']} layers"
            remark = "; ".join(part for part in (f"{split} offloaded", remark) if part)
        remark = remark.replace("|", chr(92) + "|").replace("<", "&lt;")
        lines.append(f"| {newest['model_type']} | `{newest['class_name']}` | {shown} | {remark} |")
    return "\n".join(lines)


def _version_cell(version: str, row: dict[str, Any] | None, status: str) -> str:
    """A release, and what it is there if that differs; nothing where it has no such class."""
    if row is None:
        return ""
    return version if row["status"] == status else f"{version} ({row['status'].lower()})"
