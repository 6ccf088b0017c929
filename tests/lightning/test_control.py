"""Control of tiny Lightning runs: a forced surge of the length, an end with a checkpoint, a swapped correction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from both_trainers import PROMPTS
from lightning_runs import OwnMismatch, data, module, trainer
from tiny_models import EOS, FIRST_WORD, VOCABULARY

import trl_offpolicy as op
from lightning_module import OffPolicyGRPOModule, RunFolder, control
from lightning_module.control import run_folder
from trl_offpolicy.control import read_actions
from trl_offpolicy.diagnosis import read_metrics
from trl_offpolicy.engines.engine import Rollouts, Sampling

pytestmark = pytest.mark.integration

GUARD = {"policy": "act", "controllers": {"length_guard": {"window": 2}}}
LENGTHS = [2, 2, 2, 4, 4, 4, 4, 4]
SCALES = [1.0, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0]


class Lengths(OwnMismatch):
    """Responses of a length, and log-probs with a noise, that the version of the weights determines."""

    def __init__(self, lengths: Sequence[int], noises: Sequence[float] = (0.0,) * 8) -> None:
        super().__init__()
        self.lengths, self.noises = lengths, noises
        self.words._words = self._words  # type: ignore[method-assign]

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        self.calls, self.prompts = [], []
        self.words.noise = self.noises[self.version or 0]
        return super().generate(prompt_ids, sampling, n=n)

    def _words(self) -> list[int]:
        count = self.lengths[self.version or 0] - 1
        drawn = torch.randint(FIRST_WORD, len(VOCABULARY), (count,), generator=self.words.random)
        return [*drawn.tolist(), EOS]


class Doubted(Lengths):
    """Notes what it is told of each proof, as an engine that gets only what changed is."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told: list[bool] = []

    def confirm(self, proven: bool) -> bool:
        self.told.append(proven)
        return False


class Rates(pl.Callback):
    """The learning rates that the optimizer steps with: a hook of its own, after those of the control."""

    def __init__(self) -> None:
        self.seen: list[float] = []

        self._hooked = False

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        optimizer = trainer.optimizers[0]
        if not self._hooked:
            optimizer.register_step_pre_hook(lambda *_: self.seen.append(optimizer.param_groups[0]["lr"]))
            self._hooked = True


def fit(
    folder: Path, ours: OffPolicyGRPOModule, *, ckpt: Path | None = None, save: int | None = None,
    prompts: Any = None, held_out: Any = None, **options: Any,
) -> tuple[pl.Trainer, list[float]]:  # fmt: skip
    """Train with a run folder; the trainer and the learning rates that were used."""
    rates = Rates()
    callbacks: list[pl.Callback] = [RunFolder(str(folder), report=False), rates]
    if save:
        callbacks.append(pl.callbacks.ModelCheckpoint(folder / "saved", every_n_train_steps=save, save_top_k=-1))
    owner = trainer(folder, callbacks=callbacks, enable_checkpointing=save is not None, **{"max_steps": 8, **options})
    sizes = {} if held_out is None else {"val_dataset": held_out, "val_batch_size": 2}
    owner.fit(ours, data(prompts, **sizes), ckpt_path=None if ckpt is None else str(ckpt))
    return owner, rates.seen


def column(folder: Path, key: str) -> list[float | None]:
    return [row.get(f"offpolicy/control/{key}") for row in read_metrics(folder).rows]


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_surge_halves_the_learning_rate_and_a_level_length_gives_it_back(tmp_path: Path, schedule: str) -> None:
    options = {"lr_scheduler": schedule, "learning_rate": 1e-3}
    _, scheduled = fit(tmp_path / "plain", module(Lengths(LENGTHS), control="off", **options))
    _, seen = fit(tmp_path / "run", module(Lengths(LENGTHS), control=GUARD, **options))
    assert column(tmp_path / "run", "learning_rate_scale") == SCALES
    in_force = [1.0, *SCALES[:-1]]  # a change holds from the next step on
    assert seen == pytest.approx([rate * scale for rate, scale in zip(scheduled, in_force, strict=True)])
    assert [row["learning_rate"] for row in read_metrics(tmp_path / "run").rows] == pytest.approx(seen)
    actions = read_actions(tmp_path / "run" / "actions.jsonl")
    assert [(a.step, a.what, a.before, a.after) for a in actions] == [
        (4, "learning_rate_scale", 1.0, 0.5),
        (6, "learning_rate_scale", 0.5, 1.0),
    ]


def test_a_resumed_run_decides_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    first = module(Lengths(LENGTHS), control=GUARD)
    fit(tmp_path, first, save=5)
    actions = read_actions(tmp_path / "actions.jsonl")
    (saved,) = (tmp_path / "saved").glob("*step=5*.ckpt")
    state = torch.load(saved, weights_only=False)
    assert state["offpolicy"]["control"]["controllers"] == {"length_guard": {"scale": 0.5, "changed": 4}}
    assert state["optimizer_states"][0]["param_groups"][0]["lr"] == 1e-3  # the schedule's, not halved
    _, seen = fit(tmp_path, module(Lengths(LENGTHS), control=GUARD), ckpt=saved)
    assert column(tmp_path, "learning_rate_scale") == SCALES
    assert seen == pytest.approx([0.5e-3, 1e-3, 1e-3])
    assert read_actions(tmp_path / "actions.jsonl") == actions


def test_stop_leaves_a_checkpoint_to_go_on_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noisy = module(OwnMismatch(noise=1.0), control={"policy": "stop", "patience": 3})
    owner, _ = fit(tmp_path, noisy)
    assert owner.global_step == 3 and owner.should_stop
    path = tmp_path / "checkpoints" / "stopped-step=3.ckpt"
    assert f"the run ends here with the checkpoint {path}" in capsys.readouterr().out
    (action,) = read_actions(tmp_path / "actions.jsonl")
    assert (action.what, action.step) == ("stop", 3)
    again, _ = fit(tmp_path, module(OwnMismatch(), control="stop"), ckpt=path, max_steps=5)
    assert again.global_step == 5 and [row["step"] for row in read_metrics(tmp_path).rows] == [1, 2, 3, 4, 5]


def test_warn_says_a_finding_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owner, _ = fit(tmp_path, module(OwnMismatch(noise=1.0)), max_steps=4)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[control]")]
    assert said and len(said) == len({line.partition(":")[2].partition(":")[0] for line in said})
    assert column(tmp_path, "verdict") == [3.0] * 4 and owner.global_step == 4
    assert column(tmp_path, "learning_rate_scale") == [None] * 4


def test_escalation_changes_the_correction_in_use_and_comes_back(tmp_path: Path) -> None:
    limits = {"chi2": [0.001, 0.002, 1e6], "dropped": [0.999, 1.0], "ess": 1e-9, "pearson": -1.0}
    spec = {"controllers": {"escalation": {**limits, "patience": 1, "calm": 1, "low": 0.5, "high": 2.0}}}
    engine = Lengths([4] * 8, [0.3] * 3 + [0.0] * 5)
    ours = module(engine, control=spec, correction="measure")
    fit(tmp_path, ours, max_steps=6)
    assert column(tmp_path, "correction_level") == [1, 2, 2, 1, 0, 0]
    rows = read_metrics(tmp_path).rows
    weighing = ["offpolicy/weight_applied/ess_sequence" in row for row in rows]
    assert weighing == [False, False, True, True, False, False]
    assert ["offpolicy/keep/dropped_sequence_fraction" in row for row in rows] == [False, *[True] * 4, False]
    assert ours.objective.correction == op.presets.get("measure").correction


def test_resync_has_the_weights_sent_again(tmp_path: Path) -> None:
    """Two generations at the same weights: without it one sync is enough for both."""
    engine = Doubted([4] * 8, [3.0] * 8)
    ours = module(engine, control={"controllers": {"resync": {"patience": 1}}})
    forgotten: list[int] = []
    original = ours.generation.forget_sync
    ours.generation.forget_sync = lambda: (forgotten.append(ours.trainer.global_step), original())  # type: ignore[method-assign,assignment]
    owner, _ = fit(tmp_path, ours)
    assert [(a.step, a.what) for a in read_actions(tmp_path / "actions.jsonl")] == [(1, "resync"), (2, "stop")]
    assert forgotten == [0] and owner.global_step == 2
    assert engine.told.count(False) == 1  # all weights are sent, not only those that changed


@pytest.mark.parametrize("name", [None, "paper/staleness-ceiling"])
def test_the_ceiling_follows_the_lag_of_the_rows(tmp_path: Path, name: str | None) -> None:
    """Three passes over each generation batch: the lag is 0, 1, 2, and the rate was tuned for a lag of 1."""
    spec: dict[str, Any] = {"control": {"controllers": {"staleness_ceiling": {"lag": 1, "window": 1}}}}
    if name is not None:  # its window is the default: once the lag was 2, the rate stays halved for five rows
        spec = {"correction": name}
    ours = module(Lengths([3] * 8), **spec)
    rates = Rates()
    owner = trainer(tmp_path, callbacks=[RunFolder(str(tmp_path), report=False), rates], max_steps=6)
    owner.fit(ours, data(num_iterations=3))
    expected = [1.0, 1.0, 0.5, 1.0, 1.0, 0.5] if name is None else [1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    assert column(tmp_path, "learning_rate_scale") == expected
    assert rates.seen == pytest.approx([rates.seen[0] * scale for scale in [1.0, *expected[:-1]]])


class Proved(OwnMismatch):
    """Answers the probe with the trainer's own scores, off by what ``errors`` says for each sync."""

    def __init__(self, errors: Sequence[float]) -> None:
        super().__init__()
        self.errors, self.held = errors, list[torch.Tensor]()

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        self.calls, self.prompts = [], []
        self.held.append(torch.cat([value.detach().flatten() for value in self.source.model.parameters()]))
        return super().generate(prompt_ids, sampling, n=n)

    def score(self, ids: Sequence[Sequence[int]]) -> list[list[float]]:
        error = self.errors[len(self.synced) - 1]
        return [[value + error for value in self.words._score(self.source.model, row[:1], row[1:])] for row in ids]


@pytest.mark.parametrize(
    "spec",
    [{"control": {"controllers": {"accept_update": {}}}}, {"correction": "paper/mipu"}],
    ids=["option", "preset"],
)
def test_an_update_that_parts_engine_and_trainer_is_taken_back(tmp_path: Path, spec: dict[str, Any]) -> None:
    """Of the syncs, the third has three times the usual gap; the fourth sends the accepted weights again."""
    engine = Proved([0.05, 0.05, 0.15, 0.05, 0.05])
    ours = module(engine, sync_check=True, learning_rate=1e-2, **spec)
    fit(tmp_path, ours, max_steps=4, prompts=PROMPTS)
    assert engine.synced == [0, 1, 2, 2, 3]
    same = [torch.equal(one, other) for one, other in zip(engine.held, engine.held[1:], strict=False)]
    assert same == [False, True, False]  # version 2 samples with the weights of version 1
    (action,) = read_actions(tmp_path / "actions.jsonl")
    assert (action.step, action.controller, action.what) == (2, "accept_update", "update")
    assert column(tmp_path, "updates_rejected")[-1] == 1.0


@pytest.mark.parametrize(
    "flags",
    [{}, {"num_sanity_val_steps": 1}, {"val_check_interval": 1}, {"num_sanity_val_steps": 1, "val_check_interval": 1}],
)
def test_validations_leave_the_judgement_of_updates_as_it_is(tmp_path: Path, flags: dict[str, int]) -> None:
    """The proof of version 0 is the usual gap, also if a validation before training has sent it: 1 has three times it.

    Version 2 is judged by the same gap. Each version is sent once, and once more if it was taken back.
    """
    engine = Proved([0.05, 0.15, 0.05, 0.05, 0.15, 0.05, 0.05])
    ours = module(engine, control={"controllers": {"accept_update": {}}}, sync_check=True, learning_rate=1e-2)
    fit(tmp_path, ours, max_steps=4, prompts=PROMPTS, held_out=PROMPTS.select(range(4)), **flags)
    assert [step for step in engine.synced if step < 4] == [0, 1, 1, 2, 3, 3]
    actions = read_actions(tmp_path / "actions.jsonl")
    assert [(action.step, action.controller) for action in actions] == [(1, "accept_update"), (3, "accept_update")]
    assert column(tmp_path, "updates_rejected")[-1] == 2.0


def test_controllers_that_cannot_work_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must not name resync, which needs an engine with weights of its own"):
        fit(tmp_path, module(control={"controllers": ["resync"]}))
    with pytest.raises(ValueError, match=r"control\.polcy is not an option"):
        module(control={"polcy": "act"})


def test_the_gradient_cosine_is_logged_on_demand(tmp_path: Path) -> None:
    ours = module(OwnMismatch(), control={"gradient_cosine": True})
    fit(tmp_path, ours, max_steps=3)
    values = [row.get("offpolicy/gradient/cosine_previous") for row in read_metrics(tmp_path).rows]
    assert values[0] is None and all(value is not None and -1 < value < 1 for value in values[1:])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "spec",
    [
        {"control": {"policy": "act", "controllers": {}, "max_gradient_cosine": 0.0}},
        {"correction": {"preset": "paper/gac", "options": {"max_cosine": 0.0}}},
    ],
    ids=["option", "preset"],
)
def test_a_gradient_too_aligned_with_the_one_before_is_projected(
    tmp_path: Path, spec: dict[str, Any], accumulation: int
) -> None:
    """Of an optimizer step, whose gradient is that of all its micro-batches."""
    ours = module(OwnMismatch(), learning_rate=1e-5, **spec)  # no token leaves the clip
    grads: list[torch.Tensor] = []

    class Grads(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            def note(optimizer: Any, *_: Any) -> None:
                of_all = (p.grad for group in optimizer.param_groups for p in group["params"])
                grads.append(torch.cat([grad.flatten() for grad in of_all if grad is not None]))

            trainer.optimizers[0].register_step_post_hook(note)  # the step itself makes the gradients

    flags = {"max_steps": 4, "accumulate_grad_batches": accumulation}
    owner = trainer(tmp_path, callbacks=[RunFolder(str(tmp_path), report=False), Grads()], **flags)
    owner.fit(ours, data(num_iterations=2, steps_per_generation=accumulation))
    rows = read_metrics(tmp_path).rows
    assert len(grads) == len(rows) == 4
    cosine, share = rows[1]["offpolicy/gradient/cosine_previous"], rows[1]["offpolicy/control/gradients_projected"]
    assert cosine > 0.1 and share == 1.0  # the second pass over one batch
    assert abs(float(torch.nn.functional.cosine_similarity(grads[0], grads[1], dim=0))) < 1e-4


def test_the_folder_is_asked_for_once_by_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a ``RunFolder`` it is the logger's, which Lightning broadcasts: later only the main rank speaks."""
    asked: list[pl.Trainer] = []
    monkeypatch.setattr(control, "run_folder", lambda owner: asked.append(owner) or run_folder(owner))
    trainer(tmp_path, max_steps=3).fit(module(OwnMismatch(), control={"policy": "warn"}), data())
    assert len(asked) == 1


def test_a_preset_perturbs_the_forward_that_learns(tmp_path: Path) -> None:
    """ALP by name: the engine's log-probs are the unperturbed policy's, so the ratio above them holds the noise."""
    noisy = {"preset": "paper/alp", "options": {"std": 0.05}}
    for name, method in (("plain", "paper/ppo-is"), ("noisy", noisy)):
        fit(tmp_path / name, module(OwnMismatch(), correction=method), max_steps=3)
    plain, row = (read_metrics(tmp_path / name).rows[0] for name in ("plain", "noisy"))
    assert row["offpolicy/perturbation/std"] == pytest.approx(0.05) and "offpolicy/perturbation/std" not in plain
    assert row["offpolicy/total/kl_k3"] > 1e-5 > 1e-9 > plain["offpolicy/total/kl_k3"]


def test_a_preset_with_controllers_runs_them(tmp_path: Path) -> None:
    """The learning rate follows the effective sample size of the products of ratios from the first step on."""
    ours = module(OwnMismatch(noise=0.8), correction="paper/vcpo")
    assert ours.hparams["control"]["controllers"]["ess_step"]["base"] == 1
    owner = trainer(tmp_path, callbacks=[RunFolder(str(tmp_path), report=False)], max_steps=3)
    owner.fit(ours, data())
    scales = [scale for scale in column(tmp_path, "learning_rate_scale") if scale is not None]
    assert len(scales) == 3 and min(scales) < 1.0
