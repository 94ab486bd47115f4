"""The wheel and the sdist: built, installed where no checkout is, and used from an empty folder.

The new environment sees the packages of the one that runs the tests, but not this project among
them: folders that a .pth file names are searched, while their own .pth files, by which a checkout
is installed for editing, are not read. So nothing is downloaded.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import oasis_hf
from oasis_eval.environment import commit
from oasis_hf.tools import packaged

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = {
    Path(folder).name: ROOT / folder
    for folder in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
}
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]

ELSEWHERE = {"kvpress"}
"""Imported only in an environment of its own: see `oasis_eval.peers`."""

needs_build = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("build", "hatchling")),
    reason="pip install build 'hatchling>=1.27'",
)


def run(command: list[str | Path], cwd: Path, expected: int = 0, **environment: str) -> str:
    """Runs a command without what this process was told of paths; returns what it prints.

    Args:
        command: the words of the command.
        cwd: where it runs.
        expected: its exit code.
        **environment: added to the environment of this process.
    """
    told = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if name not in told}
    # Errors and help are read here: no colours, and no line breaks within words.
    plain = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "100"}
    result = subprocess.run(
        command, cwd=cwd, env=inherited | plain | environment, capture_output=True, text=True
    )
    assert result.returncode == expected, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def contents(folder: Path) -> set[str]:
    """The files of a package folder, as a build sees them."""
    return {
        path.relative_to(folder.parent).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


# ---- one version ---------------------------------------------------------------------------------


def test_the_version_is_written_in_one_place() -> None:
    """hatch reads it from the package; a second copy could only differ."""
    assert "version" in PROJECT["project"]["dynamic"]
    source = ROOT / PROJECT["tool"]["hatch"]["version"]["path"]
    assert source == PACKAGES["oasis_hf"] / "__init__.py"
    written = re.findall(r'^__version__ = "(.+)"$', source.read_text(encoding="utf-8"), re.M)
    assert written == [oasis_hf.__version__]


def test_the_newest_entry_of_the_changelog_is_this_version() -> None:
    heads = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    newest = heads[1] if heads[0] == "Unreleased" else heads[0]
    assert newest == oasis_hf.__version__


def test_a_checkout_on_the_path_knows_its_version(tmp_path: Path) -> None:
    """Without an installation, or next to another one's metadata, what is imported is reported."""
    other = tmp_path / "oasis_hf-9.9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: oasis-hf\nVersion: 9.9.9\n")
    path = os.pathsep.join([str(tmp_path), *(str(folder.parent) for folder in PACKAGES.values())])
    printed = run([sys.executable, "-m", "oasis_hf.cli", "version"], tmp_path, PYTHONPATH=path)
    assert f"oasis-hf {oasis_hf.__version__}\n" in printed


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_an_installed_copy_reports_no_commit_of_the_repository_around_it(tmp_path: Path) -> None:
    """An environment often lies in a checkout of something else."""
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "mine.py").touch()
    (tmp_path / "installed.py").touch()
    run(["git", "init", "--quiet"], tmp_path)
    run(["git", "add", "mine.py"], tmp_path)
    run(["git", *author, "commit", "--quiet", "--message", "mine"], tmp_path)
    assert commit(tmp_path / "mine.py") != "unknown"
    assert commit(tmp_path / "installed.py") == "unknown"


# ---- declared dependencies -----------------------------------------------------------------------


def imported(folder: Path) -> set[str]:
    """Top-level names that a package imports anywhere, also inside functions."""
    names: set[str] = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - set(PACKAGES)


def required(*extras: str) -> set[str]:
    """Names of the distributions that the project, with these extras, asks for."""
    lines = [*PROJECT["project"]["dependencies"]]
    for extra in extras:
        lines += EXTRAS[extra]
    return {re.split(r"[^\w.-]", line)[0].lower() for line in lines}


@pytest.mark.parametrize(
    ("package", "extras"),
    [("oasis_hf", ()), ("oasis_kernels", ("gpu",)), ("oasis_eval", ("eval", "lm-eval"))],
)
def test_what_a_package_imports_is_a_declared_dependency(
    package: str, extras: tuple[str, ...]
) -> None:
    """Nothing is there only because another package happens to bring it."""
    names_of = importlib.metadata.packages_distributions()
    # A module that is not installed here, such as lm_eval, is taken by its own name.
    needed = {
        name: {found.lower() for found in names_of.get(name, [name.replace("_", "-")])}
        for name in imported(PACKAGES[package])
    }
    declared = required(*extras)
    assert {name for name, found in needed.items() if not found & declared} <= ELSEWHERE


def test_the_build_tools_of_the_tests_are_those_of_a_build() -> None:
    assert set(PROJECT["build-system"]["requires"]) <= set(EXTRAS["dev"])


# ---- wheel and sdist -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    # In the environment of the tests, which has what a build needs.
    path = os.environ.get("PYTHONPATH", "")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT]
    run([*map(str, command)], out, PYTHONPATH=path)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    return next(built.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel in it: the folder of its commands."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    commands = home / "bin"
    # Before the other packages come into sight, among which pip would find this project.
    pip = [sys.executable, "-m", "pip", "--python", commands / "python", "install"]
    quiet = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    run([*pip, *quiet, wheel], home)
    packages = next(home.glob("lib/python*/site-packages"))
    shared = [
        folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")
    ]
    (packages / "shared.pth").write_text("\n".join(shared) + "\n")
    return commands


@needs_build
def test_the_wheel_holds_each_package_whole_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == set().union(*map(contents, PACKAGES.values()))


@needs_build
@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_says_that_it_is_typed(wheel: Path, package: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert f"{package}/py.typed" in archive.namelist()


@needs_build
def test_the_metadata_describes_the_project(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        found = importlib.metadata.PathDistribution(zipfile.Path(archive, f"{Path(name).parent}/"))
        metadata, commands = found.metadata, found.entry_points
    assert metadata["Version"] == oasis_hf.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).strip() == (ROOT / "README.md").read_text("utf-8").strip()
    assert set(metadata.get_all("Provides-Extra") or []) == set(EXTRAS)
    minors = [f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)]
    assert set(minors) <= set(metadata.get_all("Classifier") or [])
    assert [(command.name, command.value) for command in commands] == [
        ("oasis-hf", "oasis_hf_launch:main")
    ]


@needs_build
@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs a git checkout"
)
def test_the_sdist_is_the_repository(sdist: Path) -> None:
    """So the wheel can be built and the tests can be run from it, whatever files they need."""
    listed = run(["git", "ls-files", "-co", "--exclude-standard"], ROOT).splitlines()
    with tarfile.open(sdist) as archive:
        found = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert found - {"PKG-INFO"} == {name for name in listed if (ROOT / name).is_file()}


# ---- installed -----------------------------------------------------------------------------------

USE = """
import importlib, importlib.metadata, json, sys
from pathlib import Path
import oasis_hf, oasis_hf_launch, oasis_kernels, oasis_eval
import torch
from transformers import DynamicCache
from oasis_hf import OasisCache
from oasis_hf.tools import tiny
from oasis_hf.cli import app
from oasis_hf.facts.compat import cache_kwarg
from typer.testing import CliRunner

(command,) = importlib.metadata.entry_points(group="console_scripts", name="oasis-hf")
report = {
    "origins": {name: sys.modules[name].__file__ for name in sys.argv[1:]},
    "metadata": importlib.metadata.version("oasis-hf"),
    "version": oasis_hf.__version__,
    "prefix": sys.prefix,
    "help": CliRunner().invoke(app, ["--help"]).output,
    "callable": callable(command.load()),
    "backends": {},
}
for name in oasis_kernels.BACKENDS:
    if oasis_kernels.available(name):
        report["backends"][name] = oasis_kernels.backend(name).__file__

model = tiny.tiny_model(tiny.tiny_config("llama"), "LlamaForCausalLM", "oasis")
model.generation_config.eos_token_id = None
ids = torch.randint(3, 128, (1, 90), generator=torch.Generator().manual_seed(0))
caches = {"dense": DynamicCache(config=model.config), "oasis": OasisCache(model, budget=256)}
for name, cache in caches.items():
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False,
        pad_token_id=0, **{cache_kwarg(model): cache},
    )
    report[name] = out[0, ids.shape[1]:].tolist()
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a program in the new environment finds, started from an empty folder."""
    printed = run([environment / "python", "-c", USE, *PACKAGES], tmp_path_factory.mktemp("empty"))
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


@needs_build
def test_every_package_is_imported_from_the_environment(report: dict[str, Any]) -> None:
    assert set(report["origins"]) == set(PACKAGES) and report["callable"]
    for name, origin in report["origins"].items():
        assert Path(origin).is_relative_to(report["prefix"]), name


@needs_build
def test_the_kernels_are_imported_from_the_environment(report: dict[str, Any]) -> None:
    expected = {"reference"} | ({"triton"} if importlib.util.find_spec("triton") else set())
    assert set(report["backends"]) == expected
    for name, origin in report["backends"].items():
        assert Path(origin).is_relative_to(report["prefix"]), name


@needs_build
def test_the_installed_version_is_the_imported_one(report: dict[str, Any]) -> None:
    assert report["metadata"] == report["version"] == oasis_hf.__version__


@needs_build
def test_the_installed_cache_generates_the_tokens_of_a_dense_one(report: dict[str, Any]) -> None:
    assert len(report["oasis"]) == 8
    assert report["oasis"] == report["dense"]


@needs_build
def test_the_help_of_the_installed_command_lists_its_commands(report: dict[str, Any]) -> None:
    assert all(name in report["help"] for name in ("demo", "models", "bench", "eval", "report"))


@needs_build
def test_the_installed_command_serves_a_model(environment: Path, tmp_path: Path) -> None:
    command = [environment / "oasis-hf", "models", "--filter", "qwen3_moe", "--json"]
    models = json.loads(run([*command], tmp_path))["models"]
    assert [row["status"] for row in models] == ["exact"]


@needs_build
@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec(packaged.PACKAGE) is None, reason=packaged.INSTALL_COMMAND
)
def test_the_installed_demo_runs_on_the_packaged_model(environment: Path, tmp_path: Path) -> None:
    command = [environment / "oasis-hf", "demo", "--context", "320", "--budget", "128"]
    printed = run([*command, "--max-new-tokens", "3"], tmp_path)
    assert packaged.MODEL_NAME in printed and "wanted blocks" in printed


# ---- types ---------------------------------------------------------------------------------------

TYPED = """
import oasis_eval
import oasis_kernels
from oasis_hf import OasisCache, OasisConfig

reveal_type(OasisConfig(budget=64).budget)
reveal_type(OasisCache.stats)
OasisConfig(budget=[64])
"""


@needs_build
def test_mypy_sees_the_types_of_the_installed_packages(environment: Path, tmp_path: Path) -> None:
    """Of all of them; a package without py.typed would be an error of its own here."""
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(TYPED)
    # What the packages depend on is large, and of no interest here.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n"
        "[mypy-torch.*,transformers.*,triton.*,rich.*,typer.*,psutil.*,safetensors.*]\n"
        "follow_imports = skip\nignore_missing_imports = True\n"
    )
    python = environment / "python"
    command = [sys.executable, "-m", "mypy", "--python-executable", python, "user.py"]
    lines = run([*command], tmp_path, expected=1).splitlines()
    errors = [line for line in lines if ": error: " in line]
    assert len(errors) == 1 and '"budget" to "OasisConfig"' in errors[0], lines
    assert re.search(r'Revealed type is "(builtins\.)?int \| None"', lines[0]), lines
    assert "-> oasis_hf.stats.CacheStats" in lines[1], lines
