"""Numbers of a logging window with several generations and optimizer steps: alike in both trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from both_trainers import assert_same_numbers, keep_order, run_lightning, run_trl, trl_side

pytestmark = pytest.mark.integration

ENTROPY = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0, "entropy_coef_delta": 0.01}


def test_a_window_of_several_generations(make_args: Any, fresh_model: Any, tokenizer: Any, tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    keep_order(monkeypatch)
    build = trl_side(make_args, fresh_model, tokenizer)
    options = {"gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 2}
    _, rows, calls = run_trl(build, **options, **ENTROPY)
    watch, _ = run_lightning(
        tmp_path, calls, 2, {"entropy": ENTROPY}, {"steps_per_generation": 2}, steps=4, log_every_n_steps=2
    )
    logs = watch.logs[1::2]
    assert len(rows) == len(logs) == 2
    for ours, theirs in zip(logs, rows, strict=True):
        assert_same_numbers(ours, theirs)
