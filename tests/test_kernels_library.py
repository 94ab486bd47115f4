"""The kernels as a project of the Hub's `kernels` library: laid out, described and loaded.

The library has a folder of its own, and is used in a process of its own: Transformers behaves
otherwise where it finds it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import oasis_kernels

PROJECT = Path(__file__).resolve().parents[1] / "kernels"
SOURCE = PROJECT / "torch-ext" / "oasis_kernels"
REPOSITORY = "oasis-hf/oasis-kernels"
LIBRARY = Path(sys.prefix) / "kernels-library"
"""Where `make test` puts the `kernels` library."""


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a build for each backend."""
    out = tmp_path_factory.mktemp("kernels") / "build"
    runpy.run_path(str(PROJECT / "build_local.py"))["build"](out)
    return out


def metadata(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    return found


def test_the_project_is_named_after_the_package_and_has_no_package_above_it() -> None:
    """A `kernels/__init__.py` would shadow the library for whoever works in the checkout."""
    described = tomllib.loads((PROJECT / "build.toml").read_text(encoding="utf-8"))["general"]
    assert described["name"].replace("-", "_") == oasis_kernels.__name__
    assert not (PROJECT / "__init__.py").exists()


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_build_holds_the_python_files_and_their_digests(laid_out: Path, backend: str) -> None:
    folder = laid_out / f"torch-{backend}"
    copied = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    assert copied == {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")}
    found = metadata(folder)
    assert found["backend"]["type"] == backend and found["id"].isidentifier()
    assert found["digest"]["files"] == {
        name: base64.b64encode(hashlib.sha256((SOURCE / name).read_bytes()).digest()).decode()
        for name in copied
    }


def test_a_build_takes_the_place_of_an_older_one(laid_out: Path, tmp_path: Path) -> None:
    """A module that is gone from the sources is gone from the build."""
    old = tmp_path / "torch-cpu" / "gone.py"
    old.parent.mkdir()
    old.touch()
    runpy.run_path(str(PROJECT / "build_local.py"))["build"](tmp_path)
    assert not old.exists()
    assert metadata(tmp_path / "torch-cpu") == metadata(laid_out / "torch-cpu")


def test_the_kernels_import_themselves_by_relative_names_only() -> None:
    """The library imports them under another name, next to other versions of them."""
    for file in SOURCE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert "import oasis_kernels" not in text and "from oasis_kernels" not in text, file.name


LOAD = """
import json, sys
from pathlib import Path
from kernels import get_kernel, get_local_kernel
from kernels_data import Digest, DigestAlgorithm, Metadata
import torch

project, repository = Path(sys.argv[1]), sys.argv[2]
by_path, by_name = get_local_kernel(project), get_kernel(repository)
folder = Path(by_path.__file__).parent
expected = Metadata.read_from_file(folder / "metadata.json").digest
expected.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))

reference = by_path.backend("reference")
score = torch.tensor([[[1.0, 3.0, 2.0, 3.0, float("-inf")]]])
blocks, _ = reference.select_blocks(score, 2)
report = {
    "same": by_path is by_name,
    "folder": folder.name,
    "exports": sorted(by_path.__all__),
    "blocks": sorted(blocks.flatten().tolist()),
    "modules": {name: by_path.backend(name).__name__ for name in by_path.BACKENDS
                if by_path.available(name)},
    "id": by_path.__name__,
    "installed": "oasis_kernels" in sys.modules,
}
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def loaded(laid_out: Path) -> dict[str, Any]:
    """What a process finds that loads the build by its folder, and by a name for it."""
    if not LIBRARY.is_dir() and importlib.util.find_spec("kernels_data") is None:
        pytest.skip(
            f"pip install --no-deps --target {LIBRARY} kernels==0.16.2 kernels-data==0.16.2"
        )
    project = laid_out.parent
    path = [str(LIBRARY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "LOCAL_KERNELS": f"{REPOSITORY}={project}",
        "HF_HUB_OFFLINE": "1",
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    result = subprocess.run(
        [sys.executable, "-c", LOAD, project, REPOSITORY],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_the_library_loads_the_kernels_from_a_folder(loaded: dict[str, Any]) -> None:
    """By path, and by a Hub name that LOCAL_KERNELS sends there; no installed copy is taken."""
    assert loaded["same"] and not loaded["installed"]
    assert loaded["folder"] in ("torch-cpu", "torch-cuda")
    assert loaded["exports"] == sorted(oasis_kernels.__all__)


def test_the_loaded_kernels_have_every_backend_and_compute(loaded: dict[str, Any]) -> None:
    names = [name for name in oasis_kernels.BACKENDS if oasis_kernels.available(name)]
    assert loaded["modules"] == {name: f"{loaded['id']}.{name}" for name in names}
    # The best block, and of two equal ones the later.
    assert loaded["blocks"] == [1, 3]
