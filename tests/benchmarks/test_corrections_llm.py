"""Corrections on a real model: options of the runs, what is read from them, the table and its power."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import trl_offpolicy as op
from benchmarks.corrections_llm import run, tables
from trl_offpolicy.config import OffPolicyGRPOConfig


def recorded(log_ratio: list[list[float]], steps: list[int], kept: list[int]) -> run.RecordedRollouts:
    """Rollouts of a run, two tokens a response."""
    count = len(steps)
    return run.RecordedRollouts(
        steps=np.array(steps),
        trainable=np.full(count, 2),
        kept=np.array(kept),
        row=np.repeat(np.arange(count), 2).astype(np.int32),
        position=np.tile([0, 1], count).astype(np.int32),
        sampling_logp=np.full(2 * count, -1.0, np.float32),
        log_ratio=np.array(log_ratio, np.float32).flatten(),
        weight=np.ones(2 * count, np.float32),
        keep=np.ones(2 * count, bool),
        chunks=(),
    )


def test_it_reads_the_rollouts_of_a_run() -> None:
    rho = np.array([[2.0, 1.0], [1.0, 1.0]])
    found = run.measured(recorded(np.log(rho).tolist(), [1, 2], [2, 0]))
    assert found["kl_k3"] == pytest.approx(np.mean(rho - 1 - np.log(rho)), rel=1e-5)
    assert found["ess"] == pytest.approx(5**2 / (4 * 7), rel=1e-5) and found["dropped"] == 0.5


def test_it_sets_the_band_from_the_first_quarter() -> None:
    """Means of log rho from -0.5 to 0.5 in step 1; the later steps are far off and do not count."""
    early = np.linspace(-0.5, 0.5, 101)
    logs = [[value - 0.1, value + 0.1] for value in early] + [[3.0, 3.0]] * 12
    rollouts = recorded(logs, [1] * 101 + [2, 3, 4] * 4, [2] * 113)
    low, high = run.band_of(rollouts, drops=0.2)
    assert low == pytest.approx(math.exp(-0.4), abs=1e-3) and high == pytest.approx(math.exp(0.4), abs=1e-3)


@pytest.mark.parametrize("row", run.ROWS)
def test_the_trainer_gets_the_correction(row: str, tmp_path: Path) -> None:
    spec = yaml.safe_load(run.CONFIG.read_text())
    assert {**spec["engine"], "weight_rounding": None} == {**run.ENGINE, "weight_rounding": None}
    text = run.correction(row, (0.9, 1.1))
    offpolicy = json.loads(text) if text.startswith("{") else text
    plain = {"use_cpu": True, "bf16": False, "report_to": "none", "use_vllm": True, "vllm_mode": "colocate"}
    preset = OffPolicyGRPOConfig(str(tmp_path), **plain, engine=spec["engine"], offpolicy=offpolicy).preset
    weights = {
        "none": None,
        "token_tis": op.TruncateWeight(max_weight=2.0),
        "geometric_tis": op.TruncateWeight(max_weight=2.0),
        "icepop": op.BandWeight(low=0.5, high=5.0),
        "sequence_tis": op.TruncateWeight(max_weight=5.0, level="sequence"),
    }
    assert preset.correction.weight == weights[row]
    bands = (op.RatioBand(level="sequence_mean", low=0.9, high=1.1),) if row == "geometric_tis" else ()
    assert preset.correction.keep == bands


def test_the_plan_has_the_reference_and_what_sets_the_band_first() -> None:
    options = ["--roundings", "float", "fp8", "--rows", "geometric_tis", "none", "--seeds", "3", "4"]
    plan = run.plan(run.parse(options))
    assert plan == [
        (seed, *cell) for seed in (3, 4) for cell in (("float", "none"), ("fp8", "none"), ("fp8", "geometric_tis"))
    ]


def line(rounding: str, row: str, seed: int, reward: float) -> dict[str, Any]:
    others = {"greedy": reward, "logged_last": reward, "kl_k3": 0.01, "ess": 0.9, "dropped": 0.0, "steps": 36}
    return {"rounding": rounding, "row": row, "seed": seed, "reward": reward, **others}


def test_the_table_is_paired_and_states_its_power() -> None:
    """Seeds differ by .1 each, corrections by .05 at each of them, give or take .01."""
    gains = (0.05, 0.06, 0.04)
    results = [line("fp8", "none", seed, 0.3 + 0.1 * seed) for seed in range(3)]
    results += [line("fp8", "token_tis", seed, 0.3 + 0.1 * seed + gains[seed]) for seed in range(3)]
    text = tables.report(results)
    half = 4.303 * 0.01 / math.sqrt(3)
    assert f"+0.050 ± {half:.3f}" in text
    assert f"3 seeds show a difference beyond {half:.3f}; 0.02 would need {tables.seeds_for(0.01)} seeds" in text
    assert tables.seeds_for(0.01) < tables.seeds_for(0.02) < tables.seeds_for(0.1)


def test_a_mask_without_the_run_that_sets_its_band_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"fp8-none-0 must hold rollouts\.parquet"):
        run.one_run(tmp_path / "x", 0, "fp8", "geometric_tis", 2, tmp_path)


@pytest.mark.integration
def test_a_failed_run_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with status"):
        run.launch(tmp_path / "run", ["--no_such_option", "1"])


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_the_short_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps each of unrounded and rounded rollouts, with and without correction, real model and engine."""
    assert run.main(["--short", "--out", str(tmp_path)]) == 0
    lines = {(one["rounding"], one["row"]): one for one in run.read(tmp_path / "results.jsonl")}
    assert set(lines) == {("float", "none"), ("int4_g32", "none"), ("int4_g32", "token_tis")}
    assert lines["float", "none"]["kl_k3"] < 1e-6 < 1e-3 < lines["int4_g32", "none"]["kl_k3"]
    assert all(0 <= one["reward"] <= 1 and one["commit"] for one in lines.values())
    before = capsys.readouterr().out
    assert run.main(["--short", "--out", str(tmp_path)]) == 0  # nothing is run again
    assert len(run.read(tmp_path / "results.jsonl")) == 3 and "no correction" in before
