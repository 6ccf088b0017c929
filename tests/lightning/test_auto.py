"""``correction: auto`` in tiny Lightning runs: a mismatch that grows, a clean run, a resume inside a generation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning_runs import OwnMismatch, data, module, trainer

from lightning_module import OffPolicyGRPOModule, RunFolder
from trl_offpolicy.control import read_actions
from trl_offpolicy.diagnosis import read_metrics
from trl_offpolicy.engines.engine import Rollouts, Sampling

pytestmark = pytest.mark.integration

AUTO = {"preset": "auto", "options": {"patience": 2}}


class Growing(OwnMismatch):
    """Log-probs with a noise that the version of the weights determines; the same words for the same version."""

    def __init__(self, noises: Sequence[float]) -> None:
        super().__init__()
        self.noises = noises

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        self.calls, self.prompts = [], []
        self.words.random.manual_seed(self.version or 0)
        self.words.noise = self.noises[self.version or 0]
        return super().generate(prompt_ids, sampling, n=n)


def fit(folder: Path, ours: OffPolicyGRPOModule, *, ckpt: Path | None = None, save: int | None = None, **options: Any):
    callbacks: list[pl.Callback] = [RunFolder(str(folder), report=True)]
    if save:
        callbacks.append(pl.callbacks.ModelCheckpoint(folder / "saved", every_n_train_steps=save, save_top_k=-1))
    owner = trainer(folder, callbacks=callbacks, enable_checkpointing=save is not None, **{"max_steps": 6, **options})
    prompts = data(num_generations=2)
    owner.fit(ours, prompts, ckpt_path=None if ckpt is None else str(ckpt))
    return owner


def chosen(folder: Path) -> list[str]:
    """The candidate in use at each logged step."""
    found = []
    for row in read_metrics(folder).rows:
        found += [key.split("/")[2] for key in row if key.endswith("/chosen") and row[key] == 1.0]
    return found


def test_a_clean_run_needs_no_correction_and_stays_there(tmp_path: Path) -> None:
    ours = module(Growing([0.0] * 4), correction="auto")
    fit(tmp_path, ours, max_steps=4)
    assert chosen(tmp_path) == ["none"] * 4
    assert not ours.objective.correction.weights
    (action,) = read_actions(tmp_path / "actions.jsonl")
    assert (action.step, action.what, action.before, action.after) == (0, "correction_choice", -1, 0)


def test_it_moves_where_the_mismatch_grows_and_a_resumed_run_moves_alike(tmp_path: Path) -> None:
    """With two optimizer steps a generation the checkpoint lies within one, whose numbers are half collected."""
    noises = [0.0] * 2 + [0.6] * 10
    steps = {"max_steps": 10, "accumulate_grad_batches": 2}
    first = module(Growing(noises), correction=AUTO, learning_rate=1e-4)
    fit(tmp_path, first, save=3, **steps)
    before, actions = chosen(tmp_path), read_actions(tmp_path / "actions.jsonl")
    assert before[0] == "none" != before[-1] and len(before) == 10
    assert first.objective.correction == first.auto._session.correction
    assert "Choice of the correction" in (tmp_path / "report.html").read_text()
    rows = read_metrics(tmp_path).rows
    for row in rows:
        name = next(key.split("/")[2] for key in row if key.endswith("/chosen") and row[key] == 1.0)
        weighs = "offpolicy/weight_applied/ess_token" in row
        assert weighs == (name not in ("none",)), row["step"]
        assert math.isfinite(row["offpolicy/estimator/bias_bound"])
    (saved,) = (tmp_path / "saved").glob("*step=3*.ckpt")
    again = module(Growing(noises), correction=AUTO, learning_rate=1e-4)
    fit(tmp_path, again, ckpt=saved, **steps)
    assert chosen(tmp_path) == before
    assert read_actions(tmp_path / "actions.jsonl") == actions


def test_the_trainers_own_engine_has_nothing_to_choose_by(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="transformers"):
        module(correction="auto")
    with pytest.raises(ValueError, match="must not name escalation, which needs a configured correction"):
        fit(tmp_path, module(Growing([0.0] * 2), correction="auto", control={"controllers": ["escalation"]}))
