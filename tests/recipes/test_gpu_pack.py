"""The pack for a machine without a network, downloads replaced: pieces, sums, what the other machine makes of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "recipes" / "gpu_pack.sh"
LARGEST = 64 * 1000 * 1000
WHEEL = "large-1.0-py3-none-any.whl"
CONTENT = b"".join(index.to_bytes(4, "big") * 1024 for index in range(16_000))  # 65.5 MB, no two parts the same
FAKE = """
import json, os, sys
from pathlib import Path
words = sys.argv[1:]
with open(os.environ["ASKED"], "a") as file:
    file.write(" ".join(words) + "\\n")
if "--report" in words:  # what pip writes: every package with its version and what it asks for
    asks = json.loads(os.environ["ASKS"])
    found = [{"metadata": {"name": name, "version": "1.0", "requires_dist": asks[name]}} for name in asks]
    Path(words[words.index("--report") + 1]).write_text(json.dumps({"install": found}))
if words[2] == "download":
    folder = Path(words[words.index("--dest") + 1])
    (folder / "large-1.0-py3-none-any.whl").write_bytes(Path(os.environ["WHEEL"]).read_bytes())
    (folder / "small-1.0.tar.gz").write_bytes(b"small")
"""
ASKS = {
    "vLLM": ["torch==1.0", "nvidia-cutlass_dsl>=4", "transformers"],
    "torch": ["triton==1.0; platform_system == 'Linux'", "nvidia_cublas_cu12 (==1.0)", "cuda-toolkit[cudart]", "sympy"],
    "triton": [],
    "nvidia-cublas-cu12": ["nvidia-nvjitlink"],
    "nvidia-nvjitlink": [],
    "cuda-toolkit": [],
    "sympy": [],
    "nvidia-cutlass-dsl": ["cuda-python"],
    "cuda-python": [],
    "transformers": ["safetensors"],
    "safetensors": [],
    "pycosat": [],
}
"""As the resolver would find them: names spelled as their packages do."""
OF_TORCH = {"torch", "triton", "nvidia-cublas-cu12", "nvidia-nvjitlink", "cuda-toolkit"}


class Machine:
    """A checkout with only the script and a model, and a python that notes what pip is asked for."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.asked = folder / "check out", folder / "asked.txt"
        (self.checkout / "recipes").mkdir(parents=True)
        shutil.copy(SCRIPT, self.checkout / "recipes")
        shutil.copy(ROOT / "pyproject.toml", self.checkout)
        for name in ("benchmarks", "tests", "scripts"):
            (self.checkout / name).mkdir()
        model = self.checkout / ".cache" / "SmolLM2-135M-Instruct"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (folder / "wheel").write_bytes(CONTENT)
        (folder / "fake.py").write_text(FAKE)
        (folder / "bin").mkdir()
        self.python = folder / "bin" / "python"
        self.python.write_text(
            f'#!/bin/sh\nif [ "$1" = - ]; then exec "{sys.executable}" "$@"; fi\n'  # the script's own Python is real
            f'exec "{sys.executable}" "{folder / "fake.py"}" "$@"\n'
        )
        self.python.chmod(0o755)
        self.environment = {**os.environ, "ASKED": str(self.asked), "WHEEL": str(folder / "wheel")}
        self.environment["PATH"] = f"{self.python.parent}:{os.environ['PATH']}"
        self.environment["ASKS"] = json.dumps({"large": ["small"], "small": []})
        for name in ("PYTHON", "PYTHON_VERSION", "PLATFORM", "VLLM"):
            self.environment.pop(name, None)

    def run(self, *words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = ["bash", *map(str, words)]
        return subprocess.run(
            command, cwd=cwd or self.checkout, env=self.environment, capture_output=True, text=True, timeout=120
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.integration
def test_what_is_packed_here_is_whole_on_the_other_machine(machine: Machine, tmp_path: Path) -> None:
    pack, other = tmp_path / "the pack", tmp_path / "other"
    packed = machine.run("recipes/gpu_pack.sh", pack, "large==1.0", "small")
    assert packed.returncode == 0, packed.stderr
    pieces = sorted((pack / "pieces").iterdir())
    names = [f"{WHEEL}.part000", f"{WHEEL}.part001", "model.tar.part000", "small-1.0.tar.gz.part000"]
    assert [one.name for one in pieces] == names and all(one.stat().st_size < LARGEST for one in pieces)
    assert not (pack / "whole").exists() and f"{len(names)} pieces" in packed.stdout
    sums = dict(reversed(line.split()) for line in (pack / "SHA256SUMS").read_text().splitlines())
    assert sorted(sums) == [WHEEL, "model.tar", "small-1.0.tar.gz"]
    resolved, downloaded = machine.asked.read_text().splitlines()
    assert resolved.startswith("-m pip install ") and " --dry-run --ignore-installed " in resolved
    assert resolved.split()[-2:] == ["large==1.0", "small"] and downloaded.split()[-2:] == ["large==1.0", "small==1.0"]

    other.mkdir()
    unpacked = machine.run(pack / "unpack.sh", cwd=other)
    assert unpacked.returncode == 0, unpacked.stderr
    assert (pack / "joined" / WHEEL).read_bytes() == CONTENT
    assert (other / ".cache" / "SmolLM2-135M-Instruct" / "config.json").read_text() == "{}"
    installed = machine.asked.read_text().splitlines()[-1]
    assert installed.startswith("-m pip install --quiet --no-deps --no-index --find-links ")
    assert WHEEL in installed and "small-1.0.tar.gz" in installed and "model.tar" not in installed


@pytest.mark.integration
def test_a_damaged_piece_is_named_and_nothing_is_installed(machine: Machine, tmp_path: Path) -> None:
    pack, other = tmp_path / "pack", tmp_path / "other"
    assert machine.run("recipes/gpu_pack.sh", pack, "large").returncode == 0
    with (pack / "pieces" / f"{WHEEL}.part001").open("r+b") as piece:
        piece.write(b"damaged")
    other.mkdir()
    unpacked = machine.run(pack / "unpack.sh", cwd=other)
    assert unpacked.returncode != 0 and f"{WHEEL}: FAILED" in unpacked.stdout
    assert "--no-index" not in machine.asked.read_text() and not (other / ".cache" / "SmolLM2-135M-Instruct").exists()
    again = machine.run("recipes/gpu_pack.sh", pack, "large")
    assert again.returncode == 2 and "DIR must be a new folder" in again.stderr and again.stderr.count("\n") == 1


def test_without_a_folder_it_prints_its_help(machine: Machine) -> None:
    said = machine.run("recipes/gpu_pack.sh")
    assert said.returncode == 0 and said.stdout.startswith("Gathers what recipes/gpu_day.sh needs")
    assert "VLLM " in said.stdout and not machine.asked.exists()


@pytest.mark.integration
def test_by_itself_it_asks_for_everything_of_the_day_but_what_comes_with_torch(
    machine: Machine, tmp_path: Path
) -> None:
    machine.environment |= {"ASKS": json.dumps(ASKS), "VLLM": "0.27.1", "PYTHON_VERSION": "3.12"}
    packed = machine.run("recipes/gpu_pack.sh", tmp_path / "pack")
    assert packed.returncode == 0, packed.stderr
    resolved, downloaded = (line.split() for line in machine.asked.read_text().splitlines())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["quickstart"], *extras["lightning"], *extras["test"]]
    assert {one.replace(" ", "") for one in wanted} <= set(resolved) and "vllm==0.27.1" in resolved
    assert "--no-deps" not in resolved

    asked = {re.split("==", word)[0] for word in downloaded if "==" in word}
    assert asked == {name.lower() for name in ASKS} - OF_TORCH
    named = {line.split()[2] for line in packed.stderr.splitlines() if line.startswith("left out: ")}
    assert named == OF_TORCH
    assert "--no-deps" in downloaded and downloaded[downloaded.index("--python-version") + 1] == "3.12"
    platforms = [after for word, after in pairwise(downloaded) if word == "--platform"]
    assert {"manylinux_2_28_x86_64", "manylinux2014_x86_64"} <= set(platforms)
    joined = {path.name for path in (tmp_path / "pack" / "pieces").iterdir()}
    assert not any(name.startswith(("report", "wanted")) for name in joined)


def test_outside_a_checkout_it_says_what_is_absent(machine: Machine, tmp_path: Path) -> None:
    (machine.checkout / "scripts").rmdir()
    said = machine.run("recipes/gpu_pack.sh", tmp_path / "pack")
    assert said.returncode == 2 and said.stderr.count("\n") == 1 and not (tmp_path / "pack").exists()
    assert "needs a checkout (git clone trl-offpolicy), but there is no scripts beside recipes" in said.stderr
