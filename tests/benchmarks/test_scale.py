"""benchmarks/scale.py: its arithmetic by hand, the committed counts, and the table of docs/scale_out.md."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import scale

ROOT = Path(__file__).resolve().parents[2]
RESULTS: dict[str, Any] = json.loads(scale.RESULTS.read_text())
COUNTS = RESULTS["worlds"]["2"]["counts"]


def made_up(fixed: int, by_row: int, by_token: int) -> dict[str, dict[str, dict[str, int]]]:
    """Counts of a part "x" that gathers so many bytes and reduces 100 in all."""
    return {
        f"{rows} x {length}": {
            "x": {"calls": 3, "reduced": 100, "gathered": fixed + by_row * rows + by_token * rows * length}
        }
        for rows, length in scale.SIZES
    }


def test_bytes_by_row_and_token_come_back() -> None:
    assert scale.bytes_of(made_up(48, 13, 4), "x", "gathered") == (48, 13, 4)
    assert scale.bytes_of(made_up(48, 13, 4), "x", "reduced") == (100, 0, 0)


def test_cost_by_hand() -> None:
    found = scale.cost(made_up(48, 13, 4), "x", world=64, rows=10, length=100)
    given = 48 + 130 + 4000
    assert found["held"] == 64 * given and found["received"] == 200 + 63 * given
    assert found["seconds"] == pytest.approx(3 * 6 * scale.LATENCY + found["received"] / scale.BANDWIDTH)


def test_what_a_rank_gives_does_not_depend_on_the_number_of_ranks() -> None:
    """Or the table could not be computed from two ranks."""
    assert set(RESULTS["worlds"]) == {"2", "4", "8"}
    assert all(found["counts"] == COUNTS for found in RESULTS["worlds"].values())


def test_known_sizes() -> None:
    """Ids and masks of a group term, float32 entries of a budget: what the formulas of the page rest on."""
    duplicates = scale.bytes_of(COUNTS, "duplicates", "gathered")
    assert duplicates == (0, 8 + 8, 0)  # a 64-bit key of each response, and beside it whether it has a token
    assert scale.bytes_of(COUNTS, "token budget", "gathered") == (0, 0, 4)
    assert scale.bytes_of(COUNTS, "normalised weights", "gathered") == (0, 0, 0)
    assert scale.bytes_of(COUNTS, "diagnostics", "gathered")[2] == 0  # by response, whatever its length
    assert scale.answers() == RESULTS["answers"]


def test_parts_outside_the_optimizer_step() -> None:
    for counted in COUNTS.values():
        assert counted["verl's micro-batch"] == counted["diagnostics"]  # the same numbers, but at every micro-batch
        assert counted["proof of a sync"]["calls"] == 3 * counted["objects"]["calls"]
        assert counted["old policies"] == {"calls": 1, "reduced": 2 * 8, "gathered": 0}  # tokens of two versions


def test_what_depends_on_the_number_of_ranks() -> None:
    for world, found in RESULTS["worlds"].items():
        rows, weights = found["by_world"]["rows"], found["by_world"]["weights"]
        assert rows["calls"] == 2 + 2 * int(world)  # lengths; then sizes and rows for each rank that takes some
        assert rows["gathered"] > 24 * rows["tokens"] / 2  # ids and masks of 8 bytes, two log-probs of 4
        assert weights["given"] * int(world) == weights["weights"]  # each rank gives its shards, once
        assert weights["calls"] == 8 and weights["held"] == 64 * 64 * 4  # four layers; never more than one tensor whole


def test_the_page_has_the_tables() -> None:
    page = (ROOT / "docs" / "scale_out.md").read_text()
    assert "\n".join(scale.table(RESULTS)) in page
    assert "\n".join(scale.table_by_world(RESULTS)) in page
    assert f"{scale.GPU_ROWS} responses" in page and f"{scale.GPU_LENGTH} tokens" in page
    assert f"{scale.LATENCY * 1e6:.0f} microseconds" in page and f"{scale.BANDWIDTH / 1e9:.0f} GB" in page
    assert math.isclose(scale.BANDWIDTH * 8, 200e9)


@pytest.mark.integration
def test_two_processes_count_the_same_again() -> None:
    found = scale.launch(2, rounds=1)
    assert found["counts"] == COUNTS
    assert all(ratio > 0 for ratio in found["ratios"].values())
