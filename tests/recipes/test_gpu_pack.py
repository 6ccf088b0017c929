"""The pack for a machine without a network, downloads replaced: pieces, sums, what the other machine makes of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "gpu_pack.sh"
LARGEST = 64 * 1000 * 1000
WHEEL = "large-1.0-py3-none-any.whl"
CONTENT = b"".join(index.to_bytes(4, "big") * 1024 for index in range(16_000))  # 65.5 MB, no two parts the same
FAKE = """
import os, sys
from pathlib import Path
words = sys.argv[1:]
with open(os.environ["ASKED"], "a") as file:
    file.write(" ".join(words) + "\\n")
if words[2] == "download":
    folder = Path(words[words.index("--dest") + 1])
    (folder / "large-1.0-py3-none-any.whl").write_bytes(Path(os.environ["WHEEL"]).read_bytes())
    (folder / "small-1.0.tar.gz").write_bytes(b"small")
"""


class Machine:
    """A checkout with only the script and a model, and a python that notes what pip is asked for."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.asked = folder / "check out", folder / "asked.txt"
        (self.checkout / "recipes").mkdir(parents=True)
        shutil.copy(SCRIPT, self.checkout / "recipes")
        model = self.checkout / ".cache" / "SmolLM2-135M-Instruct"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (folder / "wheel").write_bytes(CONTENT)
        (folder / "fake.py").write_text(FAKE)
        (folder / "bin").mkdir()
        self.python = folder / "bin" / "python"
        self.python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder / "fake.py"}" "$@"\n')
        self.python.chmod(0o755)
        self.environment = {**os.environ, "ASKED": str(self.asked), "WHEEL": str(folder / "wheel")}
        self.environment["PATH"] = f"{self.python.parent}:{os.environ['PATH']}"
        self.environment.pop("PYTHON", None)

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
    assert machine.asked.read_text().split()[-2:] == ["large==1.0", "small"]

    other.mkdir()
    unpacked = machine.run(pack / "unpack.sh", cwd=other)
    assert unpacked.returncode == 0, unpacked.stderr
    assert (pack / "joined" / WHEEL).read_bytes() == CONTENT
    assert (other / ".cache" / "SmolLM2-135M-Instruct" / "config.json").read_text() == "{}"
    installed = machine.asked.read_text().splitlines()[-1]
    assert installed.startswith("-m pip install --quiet --no-deps --no-index ")
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
    assert "install" not in machine.asked.read_text() and not (other / ".cache" / "SmolLM2-135M-Instruct").exists()
    again = machine.run("recipes/gpu_pack.sh", pack, "large")
    assert again.returncode == 2 and "DIR must be a new folder" in again.stderr and again.stderr.count("\n") == 1


def test_without_a_folder_it_prints_its_help(machine: Machine) -> None:
    said = machine.run("recipes/gpu_pack.sh")
    assert said.returncode == 0 and said.stdout.startswith("Gathers what recipes/gpu_day.sh needs")
    assert "VLLM " in said.stdout and not machine.asked.exists()
