"""Lays out `build/torch-<backend>/`, the folders that the `kernels` library loads a kernel from.

    python kernels/build_local.py [--out FOLDER]

kernel-builder makes the same folders when a kernel is published. This package compiles nothing
ahead of time, so here they are a copy of its Python files and a description of them:

    from kernels import get_local_kernel
    oasis_kernels = get_local_kernel(Path("kernels"))

Needs nothing but Python.
"""

import argparse
import base64
import hashlib
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent
# What kernel-builder takes along, unless [torch-noarch] says otherwise.
COPIED = {".py", ".pyi"}


def build(out: Path = PROJECT / "build") -> list[Path]:
    """Writes one folder for each backend of `build.toml`, in place of what was there.

    Args:
        out: where the folders go.

    Returns:
        The folders.
    """
    described = tomllib.loads((PROJECT / "build.toml").read_text(encoding="utf-8"))["general"]
    source = PROJECT / "torch-ext" / described["name"].replace("-", "_")
    files = {
        path.relative_to(source).as_posix(): path
        for path in sorted(source.rglob("*"))
        if path.suffix in COPIED
    }
    made = []
    for backend in described["backends"]:
        folder = out / f"torch-{backend}"
        shutil.rmtree(folder, ignore_errors=True)
        for name, path in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
        text = json.dumps(_metadata(described, backend, files), indent=2) + "\n"
        (folder / "metadata.json").write_text(text, encoding="utf-8")
        made.append(folder)
    return made


def _metadata(described: dict[str, Any], backend: str, files: dict[str, Path]) -> dict[str, Any]:
    """What `metadata.json` says of one backend's folder."""
    digests = {name: hashlib.sha256(path.read_bytes()).digest() for name, path in files.items()}
    # The kernel is imported under its id: other contents must have another.
    content = hashlib.sha256(b"".join(digests.values())).hexdigest()[:7]
    module = described["name"].replace("-", "_")
    return {
        "name": described["name"],
        "id": f"_{module}_{backend}_{content}",
        "version": described["version"],
        "license": described["license"],
        "python-depends": described.get("python-depends", []),
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(found).decode() for name, found in digests.items()},
        },
    }


def main() -> None:
    """Builds, and says where."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=PROJECT / "build")
    for folder in build(parser.parse_args().out):
        print(folder)


if __name__ == "__main__":
    main()
