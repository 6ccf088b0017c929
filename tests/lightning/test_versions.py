"""An engine may sample with weights that are older than the trainer's and say so, without ``async_rollouts``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning_runs import OwnMismatch, Rows, Watch, data, module, trainer

STEPS = 3
BOUND = {"keep": [{"type": "staleness_bound", "max_lag": 1}]}


class Late(OwnMismatch):
    """Its first completion of a batch ends with a token that was sampled so many versions ago.

    Args:
        lag: versions; None = it cannot tell of any token.
    """

    def __init__(self, lag: int | None) -> None:
        super().__init__(noise=0.01)
        self.lag = lag

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        found = super().generate(*args, **kwargs)
        if self.lag is None:
            return replace(found, policy_versions=[[-1] * len(row) for row in found.policy_versions])
        first, *others = found.policy_versions
        return replace(found, policy_versions=[[*first[:-1], max(first[-1] - self.lag, 0)], *others])


def trained(folder: Path, engine: Any) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """What is logged of each step, and the generation batches, one per step."""
    watch, rows = Watch(), Rows()
    trainer(folder, callbacks=[watch, rows], max_steps=STEPS).fit(
        module(engine, correction=BOUND), data(micro_batch_size=8)
    )
    return watch.logs, rows.batches


def test_lags_and_the_staleness_bound_see_the_version_of_each_token(tmp_path: Path) -> None:
    logs, batches = trained(tmp_path, Late(2))
    for step, (row, batch) in enumerate(zip(logs, batches, strict=True)):
        lag, tokens = min(step, 2), int(batch["completion_mask"].sum())
        assert row["offpolicy/rollout/version_lag_max"] == lag
        assert row["offpolicy/rollout/version_lag_mean"] == pytest.approx(lag / tokens, rel=1e-5)
        assert row["offpolicy/keep/staleness_bound/dropped_fraction"] == pytest.approx((lag > 1) / 8)


@pytest.mark.parametrize("lag", [0, None])
def test_the_trainers_version_stands_where_none_is_older_or_known(lag: int | None, tmp_path: Path) -> None:
    logs, batches = trained(tmp_path, Late(lag))
    for step, (row, batch) in enumerate(zip(logs, batches, strict=True)):
        assert batch["policy_versions"].tolist() == [step] * 8
        assert row["offpolicy/rollout/version_lag_max"] == 0


class AlwaysLate(OwnMismatch):
    """Every token was sampled one version ago."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        found = super().generate(*args, **kwargs)
        return replace(found, policy_versions=[[max(v - 1, 0) for v in row] for row in found.policy_versions])


def test_a_mismatch_that_nobody_measured_is_not_logged_as_none(tmp_path: Path) -> None:
    """Without old log-probs no row of older weights says how far the engine is from the trainer."""
    watch = Watch()
    trainer(tmp_path, callbacks=[watch], max_steps=STEPS).fit(
        module(AlwaysLate(noise=0.3), correction="measure"), data(micro_batch_size=8)
    )
    assert watch.logs[0]["offpolicy/mismatch/kl_k3"] > 0.01
    for row in watch.logs[1:]:
        assert row["offpolicy/rollout/version_lag_mean"] == 1.0
        assert not [key for key in row if key.startswith(("offpolicy/mismatch/", "offpolicy/kept/"))]


class Newer(OwnMismatch):
    """Counts versions of its own."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        found = super().generate(*args, **kwargs)
        return replace(found, policy_versions=[[3] * len(row) for row in found.policy_versions])


def test_a_version_that_the_trainer_has_not_reached_is_refused(tmp_path: Path) -> None:
    message = r"^engine: policy_versions must be at most 0, the optimizer steps so far, but got 3\.$"
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, Newer(noise=0.01))
