"""Replies that cannot be used, in Lightning: the run ends with the reason, or the step goes on without them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_runs import OwnMismatch, Watch, data, module, trainer

from trl_offpolicy.engines.engine import Rollouts, Sampling
from trl_offpolicy.rollouts.screening import RolloutError

BAD = 2
"""The row of the second generation batch that cannot be used: the third of its group of four."""
BROKEN: dict[str, tuple[list[int], list[float], str]] = {
    "empty": ([], [], "it is empty"),
    "vocabulary": ([5, 4000], [-1.0, -1.0], "its token 1 is 4000, outside the vocabulary of 128 ids"),
    "positive": ([5, 6], [-1.0, 3.0], "the log-prob of its token 1 is \\+3, above 0"),
}


class Broken(OwnMismatch):
    """An engine that gives one reply that cannot be used, in its second request."""

    def __init__(self, ids: list[int], logps: list[float], *, missing: bool = False) -> None:
        super().__init__(noise=0.3)
        self.reply, self.missing, self.asked = (ids, logps), missing, []

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        found = super().generate(prompt_ids, sampling, n=n)
        self.asked.append(len(prompt_ids) * n)
        if len(self.asked) != 2:
            return found
        columns = [found.prompt_ids, found.completion_ids, found.sampling_per_token_logps, found.policy_versions]
        if self.missing:
            for column in (*columns, found.finish_reasons):
                del column[BAD]  # type: ignore[union-attr]
            return found
        for column, value in zip(columns[1:], (*self.reply, [0] * len(self.reply[0])), strict=True):
            column[BAD] = value  # type: ignore[index,call-overload]
        return found


class Silent(OwnMismatch):
    """An engine without log-probs."""

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        found = super().generate(prompt_ids, sampling, n=n)
        for row in found.sampling_per_token_logps or []:
            row[:] = [math.nan] * len(row)
        return found


def fit(engine: Any, folder: Path, **options: Any) -> Any:
    """A run of two steps of eight completions: (module, what was logged)."""
    made, watch = module(engine, correction="paper/tis", **options), Watch()
    run = trainer(folder, max_steps=2, accumulate_grad_batches=2, callbacks=[watch])
    run.fit(made, data(steps_per_generation=2))
    return made, watch


@pytest.mark.integration
@pytest.mark.parametrize("name", BROKEN)
def test_the_run_ends_with_the_request_and_the_reason(tmp_path: Path, name: str) -> None:
    ids, logps, reason = BROKEN[name]
    with pytest.raises(RolloutError, match=f"1 of 8 replies.*row {BAD}: the reply to 'w.*' cannot be used: {reason}"):
        fit(Broken(ids, logps), tmp_path)


@pytest.mark.integration
def test_a_dropped_reply_leaves_the_step_and_its_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it held makes no difference, a missing one counts as empty, and its group is judged without it."""
    from lightning_module.generation import Generation

    batches: list[dict[str, torch.Tensor]] = []
    original = Generation._generate
    monkeypatch.setattr(Generation, "_generate", lambda self, step: batches.append(original(self, step)) or batches[-1])
    weights = []
    for name, (ids, logps, _) in {**BROKEN, "missing": ([], [], "")}.items():
        made, watch = fit(Broken(ids, logps, missing=name == "missing"), tmp_path / name, on_bad_rollout="drop")
        logged = [row.get("offpolicy/rollout/unusable_fraction") for row in watch.logs]
        assert logged == [None, 1 / 8]
        weights.append(torch.cat([p.detach().flatten() for p in made.policy.parameters()]))
    assert all(torch.equal(one, weights[0]) for one in weights[:-1])  # the missing one moved the words of others

    batch, others = batches[1], [0, 1, 3]
    assert not batch["completion_mask"][BAD].any() and batch["completion_mask"].any(-1).sum() == 7
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    rewards = batch["rewards"]
    assert rewards.isnan().tolist() == [row == BAD for row in range(8)]
    expected = (rewards[others] - rewards[others].mean()) / (rewards[others].std() + 1e-4)
    torch.testing.assert_close(batch["advantages"][others], expected, rtol=1e-4, atol=1e-5)
    assert batch["advantages"][BAD] == 0.0


@pytest.mark.integration
def test_retry_asks_again_and_trains_on_the_answer(tmp_path: Path) -> None:
    engine = Broken([], [])
    _, watch = fit(engine, tmp_path, on_bad_rollout="retry")
    assert engine.asked == [8, 8, 1]
    assert watch.logs[1]["offpolicy/rollout/retried_fraction"] == 1 / 8
    assert watch.logs[1]["offpolicy/rollout/unusable_fraction"] == 0.0


@pytest.mark.integration
@pytest.mark.parametrize("mode", ["raise", "drop"])
def test_no_log_prob_ends_the_run_before_a_step(tmp_path: Path, mode: str) -> None:
    made, watch = module(Silent(), correction="measure", on_bad_rollout=mode), Watch()
    with pytest.raises(RolloutError, match=r"gave none that is finite in a whole generation batch"):
        trainer(tmp_path, max_steps=2, callbacks=[watch]).fit(made, data())
    assert watch.logs == []


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match=r"on_bad_rollout must be one of .*raise"):
        module(on_bad_rollout="ignore")
