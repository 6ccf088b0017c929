"""The soak in small: a real trainer and a real server, with a fault every few seconds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak


def rows(count: int, **changes: float) -> dict[int, dict[str, float]]:
    return {
        step: {"loss": step / 7, "reward": 1.0, "grad_norm": 2.0, "offpolicy/rollout/sync_agreement": 1.0, **changes}
        for step in range(1, count + 1)
    }


def test_promises_that_are_broken_are_told() -> None:
    assert soak.broken_promises(rows(9), rows(5), 5) == []
    other = rows(9)
    other[3] = {**other[3], "loss": 0.5}
    assert "of 5 steps 1 differ from the undisturbed run, first [3]" in soak.broken_promises(other, rows(5), 5)
    assert soak.broken_promises(other, rows(5), 2) == []  # the others are not promised
    del other[4]
    assert "1 steps are missing, first 4" in soak.broken_promises(other, rows(5), 2)
    assert soak.broken_promises(rows(3, **{"offpolicy/rollout/sync_agreement": 0.9}), rows(3), 3)
    assert soak.broken_promises({}, {}, 0)
    still = rows(10, grad_norm=0.0)
    assert "the weights moved in 0 of 10 steps only" in soak.broken_promises(still, still, 10)[0]


def test_growth_is_told() -> None:
    def looks(growth: float) -> list[dict[str, float]]:
        return [{"time": n, "megabytes": 500 + growth * n, "files": 20.0, "threads": 9.0} for n in range(60)]

    assert soak.grown({"server 1": looks(0.0), "trainer 2": looks(-1.0)}) == []
    assert soak.grown({"server 1": looks(5.0)}) == ["server 1: megabytes grew from 548 to 748"]
    assert soak.grown({"server 1": looks(5.0)[:20]}) == []  # too short to tell


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(3000)
def test_a_short_soak_keeps_every_promise(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Each fault in turn, so that all come; on a busy machine the minutes go by faster than steps do."""

    class InTurn(random.Random):
        def choice(self, faults: Any) -> Any:
            self.count = getattr(self, "count", -1) + 1
            return faults[self.count % len(faults)]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(soak.random, "Random", InTurn)
        options = ["--model", str(model_folder()), "--folder", str(tmp_path), "--minutes", "1.5", "--every", "9"]
        status = soak.main(options)
    found = json.loads((tmp_path / "soak.json").read_text())
    assert status == 0 and found["broken"] == []
    assert found["compared"] >= 3 and {fault["name"] for fault in found["faults"]} >= {"stopped", "slow", "lost"}
    assert found["sizes"] and (tmp_path / "soak.svg").stat().st_size > 1000
