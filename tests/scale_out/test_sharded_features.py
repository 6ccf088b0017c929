"""What reads the whole generation batch, gradients or the optimizer, under the strategies that cut the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scale_out.launching import LORA, Run, assert_same, launch, metrics, prepare

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1500)]

COSINE = "offpolicy/gradient/cosine_previous"
SCALE = "offpolicy/control/learning_rate_scale"
GUARD = {"length_guard": {"surge": 1.02, "level": 1.0, "window": 1}}
OPTIONS: dict[str, Any] = {
    **LORA,
    "learning_rate": 0.01,
    "beta": 0.0,
    "save_strategy": "no",
    "offpolicy": {"preset": "paper/tis", "advantages": "optimal_token_baseline"},  # one more forward, sums of pi^2
    "engine": {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "seed": 3, "transfer": "adapter"},
}

TRUNCATED: dict[str, Any] = {  # the trainer cuts its own distribution: another head, over a gathered weight
    "top_p": 0.8,
    "beta": 0.0,
    "save_strategy": "no",
    "offpolicy": "paper/tis",
}


def control(*, cosine: bool) -> dict[str, Any]:
    return {"policy": "act", "controllers": GUARD, "gradient_cosine": cosine}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="module")
def one(made: Path) -> Run:
    return launch(made, made / "one", None, **OPTIONS, control=control(cosine=True))


@pytest.mark.parametrize("strategy", ["cpu_zero3", "cpu_fsdp2"])
def test_wide_stage_control_and_adapter_are_those_of_one_process(made: Path, one: Run, strategy: str) -> None:
    if "zero" in strategy:
        pytest.importorskip("deepspeed")
    cosine = strategy == "cpu_fsdp2"
    run = launch(made, made / strategy, strategy, **OPTIONS, control=control(cosine=cosine))
    mine, theirs = metrics(run), metrics(one)
    assert 0.5 in [row[SCALE] for row in theirs[:-1]]  # the learning rate was halved before a step
    assert [COSINE in row for row in theirs] == [False, True, True, True]
    for row, expected in zip(mine, theirs, strict=True):
        known = {key: value for key, value in expected.items() if key != COSINE or cosine}
        assert row.keys() == known.keys()
        wrong = {k: (row[k], v) for k, v in known.items() if row[k] != pytest.approx(v, rel=2e-3, abs=2e-5)}
        assert not wrong
    for rank in run.ranks:
        assert_same(rank["weights"], one.ranks[0]["weights"], atol=2e-5)
    assert all(row["offpolicy/rollout/sync_agreement"] > 1 - 2e-4 for row in run.rows())


@pytest.fixture(scope="module")
def one_truncated(made: Path) -> Run:
    return launch(made, made / "one_truncated", None, **TRUNCATED)


@pytest.mark.parametrize("strategy", ["cpu_zero3", "cpu_fsdp2"])
def test_scores_under_truncated_sampling_are_those_of_one_process(
    made: Path, one_truncated: Run, strategy: str
) -> None:
    if "zero" in strategy:
        pytest.importorskip("deepspeed")
    run = launch(made, made / f"{strategy}_truncated", strategy, **TRUNCATED)
    assert 0 < metrics(one_truncated)[0]["offpolicy/rollout/outside_fraction"] < 1
    for row, expected in zip(metrics(run), metrics(one_truncated), strict=True):
        assert row.keys() == expected.keys()
        wrong = {k: (row[k], v) for k, v in expected.items() if row[k] != pytest.approx(v, rel=2e-3, abs=2e-5)}
        assert not wrong
    for rank in run.ranks:
        assert_same(rank["weights"], one_truncated.ranks[0]["weights"], atol=2e-5)


def test_deepspeed_cannot_show_the_cosine_and_says_so(made: Path) -> None:
    pytest.importorskip("deepspeed")
    with pytest.raises(AssertionError, match="gradient_cosine must be off"):
        launch(made, made / "cosine", "cpu_zero2", **OPTIONS, control=control(cosine=True))
