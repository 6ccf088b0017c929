"""Logs in which a number is missing, logged rarely, or no number: what may not be called healthy, or a fault."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trl_offpolicy.diagnosis.verdict.judge import Diagnosis, diagnose
from trl_offpolicy.run_folder.run_data import MetricsLog, read_metrics

Row = dict[str, float]
TOTAL, LAG = "offpolicy/total", "offpolicy/rollout/version_lag"


def judged(make: Callable[[int], Row], steps: int = 60, every: int = 1) -> Diagnosis:
    rows = tuple({"step": step, **make(step)} for step in range(every, steps * every + 1, every))
    return diagnose(MetricsLog(rows))


def severities(found: Diagnosis) -> dict[str, str]:
    return {one.cause: one.severity for one in found.findings}


def from_file(path: Path, make: Callable[[int], Row], steps: int = 60) -> Diagnosis:
    path.write_text("".join(json.dumps({"step": step, **make(step)}) + "\n" for step in range(1, steps + 1)))
    return diagnose(read_metrics(path))


# ------------------------------------------------------------------------------------- only current/sampling is logged


@pytest.mark.parametrize(
    ("lag", "expected"),
    [({}, "warning"), ({f"{LAG}_mean": 0.0, f"{LAG}_max": 0.0}, "critical"), ({f"{LAG}_mean": 2.0}, None)],
)
@pytest.mark.parametrize("far", [{f"{TOTAL}/kl_k3": 0.19}, {f"{TOTAL}/prob_pearson": 0.5}])
def test_a_large_distance_is_never_ok(far: Row, lag: Row, expected: str | None) -> None:
    found = judged(lambda step: {**far, **lag})
    if expected is not None:
        assert severities(found)["engine_mismatch"] == expected
    elif f"{TOTAL}/kl_k3" in far:  # of old rollouts it is staleness
        assert severities(found) == {"policy_staleness": "warning"}


def test_a_distance_that_is_divided_is_judged_by_its_parts() -> None:
    parts = {"offpolicy/mismatch/kl_k3": 0.0005, "offpolicy/mismatch/prob_pearson": 0.9995, f"{TOTAL}/kl_k3": 0.3}
    assert "engine_mismatch" not in severities(judged(lambda step: parts))
    assert severities(judged(lambda step: {f"{TOTAL}/kl_k3": 0.0005})) == {}


# ------------------------------------------------------------------------------------------------- few rows are logged


@pytest.mark.parametrize("every", [1, 5, 10, 20, 50])
def test_growth_is_that_over_a_hundred_steps_however_often_is_logged(every: int) -> None:
    def row(growth: float) -> Callable[[int], Row]:
        return lambda step: {
            "completions/mean_length": 100 * growth**step,
            "offpolicy/mismatch/kl_k3": 0.0005,
            "reward": 0.5,
        }

    # 12.7 % in a hundred steps is healthy, half as much again is not
    assert "length_surge" not in severities(judged(row(1.0012), steps=max(20, 300 // every), every=every))
    assert "length_surge" in severities(judged(row(1.005), steps=max(20, 300 // every), every=every))


def test_one_straggler_hides_no_queue() -> None:
    def row(step: int) -> Row:
        return {f"{LAG}_mean": 5.0, f"{LAG}_max": 8.0 if step == 55 else 5.0, f"{TOTAL}/kl_k3": 0.0005}

    found = judged(row)
    assert (
        severities(found)["policy_staleness"] == "warning"
        and "queue that nothing corrects" in found.findings[0].symptom
    )


@pytest.mark.parametrize("passes", [2, 4, 10, 12, 16])
def test_several_steps_on_a_generation_are_no_queue(passes: int) -> None:
    """Each is logged by itself, with one lag for all its tokens."""

    def row(step: int) -> Row:
        lag = float((step - 1) % passes)
        near = {"offpolicy/mismatch/kl_k3": 0.001, "offpolicy/mismatch/prob_pearson": 0.999}
        return {**near, f"{LAG}_mean": lag, f"{LAG}_max": lag, "offpolicy/gradient/cosine_previous": 0.35}

    assert "warning" not in severities(judged(row)).values()


# ----------------------------------------------------------------------------------------------- numbers that are none


SANE = {"loss": 0.01, "offpolicy/loss/entropy": 0.5, "offpolicy/mismatch/kl_k3": 0.0005, "reward": 0.5}


def test_skipped_updates_are_no_lost_weights(tmp_path: Path) -> None:
    found = from_file(tmp_path / "a.jsonl", lambda step: {**SANE, "grad_norm": math.inf if step > 30 else 1.0})
    assert found.broken is None and severities(found) == {"no_signal": "critical"}
    assert "updates are most likely skipped" in found.findings[0].fix
    apart = {**SANE, "offpolicy/mismatch/kl_k3": 0.2}
    found = from_file(
        tmp_path / "b.jsonl",
        lambda step: {**(apart if step > 30 else SANE), "grad_norm": math.inf if step > 30 else 1.0},
    )
    assert severities(found)["engine_mismatch"] == "critical"  # of the rows that were left out so far
    lost = from_file(
        tmp_path / "c.jsonl", lambda step: {**SANE, **({"grad_norm": math.nan, "loss": math.nan} if step > 30 else {})}
    )
    assert lost.broken is not None and "weights are probably lost" in lost.line()
    first = from_file(tmp_path / "d.jsonl", lambda step: {**SANE, "grad_norm": math.nan}, steps=3)
    assert first.broken is None and severities(first) == {"no_signal": "notice"}  # float16 looks for its loss scale


def test_weights_that_are_lost_behind_a_loss_of_zero(tmp_path: Path) -> None:
    """transformers logs 0 for a loss that is NaN."""

    def row(step: int, since: int) -> Row:
        return {"loss": 0.0, "grad_norm": math.nan, "entropy": math.nan, "reward": 0.0} if step >= since else {
            "loss": 0.01, "grad_norm": 1.0, "entropy": 0.5, "reward": 0.5}  # fmt: skip

    for since, steps in ((26, 60), (1, 8)):
        found = from_file(tmp_path / f"{since}.jsonl", lambda step, since=since: row(step, since), steps)  # type: ignore[misc]
        assert found.broken is not None and "weights are probably lost" in found.line()


# -------------------------------------------------------------------------------------------------- other frameworks


def test_a_collapse_in_skyrls_names_is_seen(tmp_path: Path) -> None:
    near = {f"policy/rollout_train_logprobs_abs_diff_{end}": value for end, value in (("mean", 0.002), ("max", 0.05))}

    def falls(step: int) -> Row:
        return {**near, "policy/policy_entropy": math.exp(-step / 30), "reward/avg_raw_reward": 0.5}

    def still(step: int) -> Row:
        return {**near, "loss/avg_raw_advantages_abs": 0.0, "policy/grad_norm": 0.01, "reward/avg_raw_reward": 0.0}

    assert "entropy_collapse" in severities(from_file(tmp_path / "a.jsonl", falls, 150))
    assert severities(from_file(tmp_path / "b.jsonl", still, 100))["no_signal"] == "warning"


def test_advantages_of_zero_beside_a_kl_loss_are_seen_in_verls_names(tmp_path: Path) -> None:
    def row(step: int) -> Row:
        return {
            "critic/score/mean": 0.0, "critic/advantages/max": 0.0, "critic/advantages/min": 0.0,
            "actor/grad_norm": 0.01, "training/rollout_actor_probs_pearson_corr": 0.9995,
        }  # fmt: skip

    assert severities(from_file(tmp_path / "a.jsonl", row, 39)) == {"no_signal": "warning"}


def test_one_token_beside_a_healthy_correlation_is_a_notice(tmp_path: Path) -> None:
    def row(step: int) -> Row:
        return {
            "training/rollout_actor_probs_pearson_corr": 0.9995, "training/rollout_probs_diff_mean": 0.002,
            "training/rollout_probs_diff_max": 0.55 if step == 50 else 0.3,
        }  # fmt: skip

    assert set(severities(from_file(tmp_path / "a.jsonl", row)).values()) == {"notice"}


def test_a_growth_whose_kl_is_not_known_is_not_called_healthy() -> None:
    def row(step: int) -> Row:
        return {"reward": 0.2 + step / 200, "completions/mean_length": 100 * 1.004**step, "loss": 0.1, "grad_norm": 1.0}

    (found,) = (one for one in judged(row, 120).findings if one.cause == "length_surge")
    assert found.severity == "notice" and "were not logged" in found.fix and "healthy" not in found.fix


def test_an_entropy_that_falls_while_both_sides_agree_asks_for_no_correction() -> None:
    def row(kl: float) -> Callable[[int], Row]:
        return lambda step: {"offpolicy/loss/entropy": math.exp(-step / 30), "offpolicy/mismatch/kl_k3": kl}

    stale = judged(lambda step: {**row(0.0005)(step), f"{TOTAL}/kl_k3": 0.03}, 150).findings
    assert ["truncated token weights" in one.fix for one in stale if one.cause == "entropy_collapse"] == [True]
    for kl, said in ((0.0005, "no correction mends it"), (0.02, "truncated token weights")):
        (found,) = (one for one in judged(row(kl), 150).findings if one.cause == "entropy_collapse")
        assert found.severity == "warning" and said in found.fix


# -------------------------------------------------------------------------------------------------------- checkpoints


def state(folder: Path, step: int, when: float) -> None:
    folder.mkdir(parents=True)
    rows = [{"step": at, "loss": 0.1, "reward": 0.5} for at in range(1, step + 1)]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": rows}))
    os.utime(folder / "trainer_state.json", (when, when))


def test_the_last_checkpoint_is_read_whatever_the_time_of_its_file(tmp_path: Path) -> None:
    state(tmp_path / "run" / "checkpoint-100", 100, 2e9)
    state(tmp_path / "run" / "checkpoint-500", 500, 1e9)
    log: Any = read_metrics(tmp_path / "run")
    assert log.steps[-1] == 500
    state(tmp_path / "run" / "saved", 500, 1e9)
    (tmp_path / "run" / "saved" / "trainer_state.json").rename(tmp_path / "run" / "trainer_state.json")
    assert read_metrics(tmp_path).steps[-1] == 500  # of the folder above, too
    state(tmp_path / "other" / "checkpoint-5", 5, 1e9)
    with pytest.raises(FileNotFoundError, match="must hold one run, but got checkpoints of several"):
        read_metrics(tmp_path)
