"""The pinned lists: every package takes the oldest Python that the project takes."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
LISTS = sorted((ROOT / "constraints").glob("*.txt"))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_pinned_package_takes_the_oldest_python(path: Path) -> None:
    """3.11.2 is Debian 12's; 3.11.0 is the oldest that pyproject.toml lets in."""
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    refused, seen = [], 0
    for line in path.read_text().splitlines():
        if not re.match(r"[\w.-]+==", line):
            continue
        name = Requirement(line.split(" #")[0]).name
        try:
            wanted = metadata(name)["Requires-Python"]
        except PackageNotFoundError:
            continue  # for another system
        seen += 1
        if wanted and not SpecifierSet(wanted).contains(f"{oldest}.0"):
            refused.append(f"{line} wants Python {wanted}")
    assert not refused and (seen > 10 or path.stem == "slow")  # those need not be installed
