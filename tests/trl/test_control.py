"""Control of real, tiny TRL runs: a forced surge of the length, ends with a checkpoint, a swapped correction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import EOS, FIRST_WORD, VOCABULARY
from trainer_runs import Engine, records
from transformers import TrainerCallback

import trl_offpolicy as op
from trl_offpolicy.control import read_actions
from trl_offpolicy.objective.coefficients import STATE_FILE
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

pytestmark = pytest.mark.integration

Build = Callable[..., OffPolicyGRPOTrainer]
GUARD = {"policy": "act", "controllers": {"length_guard": {"window": 2}}}
LENGTHS = [2, 2, 2, 4, 4, 4, 4, 4]
"""By optimizer step: the surge comes with the fourth."""
SCALES = [1.0, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0]
"""After the fourth halved; four steps and as many as the window later the length is level."""


class Lengths(Engine):
    """Responses of a length that the step determines."""

    def __init__(self, lengths: list[int], **mismatch: float) -> None:
        super().__init__(**mismatch)
        self.lengths, self.now = lengths, 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        self.now = self.lengths[trainer.state.global_step]
        return super().__call__(prompts, trainer)

    def _words(self) -> list[int]:
        drawn = torch.randint(FIRST_WORD, len(VOCABULARY), (self.now - 1,), generator=self.random)
        return [*drawn.tolist(), EOS]


class Rates(TrainerCallback):  # type: ignore[misc]
    """The learning rates that the optimizer steps with: a hook of its own, after those of the control."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"].optimizer
        optimizer.register_step_pre_hook(lambda *_: self.seen.append(optimizer.param_groups[0]["lr"]))


def used_learning_rates(trainer: OffPolicyGRPOTrainer) -> list[float]:
    rates = Rates()
    trainer.add_callback(rates)
    return rates.seen


def scales(trainer: OffPolicyGRPOTrainer) -> list[float]:
    return [row["offpolicy/control/learning_rate_scale"] for row in records(trainer)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_surge_halves_the_learning_rate_and_a_level_length_gives_it_back(build: Build, schedule: str) -> None:
    options = {"max_steps": 8, "lr_scheduler_type": schedule, "learning_rate": 1e-3}
    plain = build(Lengths(LENGTHS), control="off", **options)
    plain.train()
    scheduled = [row["learning_rate"] for row in records(plain)]
    trainer = build(Lengths(LENGTHS), control=GUARD, **options)
    seen = used_learning_rates(trainer)
    trainer.train()
    assert scales(trainer) == SCALES
    in_force = [1.0, *SCALES[:-1]]  # a change holds from the next step on
    assert seen == pytest.approx([rate * scale for rate, scale in zip(scheduled, in_force, strict=True)])
    assert [row["learning_rate"] for row in records(trainer)] == pytest.approx(seen)
    assert trainer.state.log_history[4]["learning_rate"] == pytest.approx(seen[4])
    actions = read_actions(Path(trainer.args.output_dir) / "actions.jsonl")
    assert [(a.step, a.what, a.before, a.after) for a in actions] == [
        (4, "learning_rate_scale", 1.0, 0.5),
        (6, "learning_rate_scale", 0.5, 1.0),
    ]


@pytest.mark.parametrize("checkpoint", [4, 5])
def test_a_resumed_run_decides_as_if_it_had_not_stopped(build: Build, checkpoint: int) -> None:
    options = {"control": GUARD, "max_steps": 8, "learning_rate": 1e-3}
    first = build(Lengths(LENGTHS), **options, save_strategy="steps", save_steps=checkpoint)
    first.train()
    folder = Path(first.args.output_dir) / f"checkpoint-{checkpoint}"
    actions = read_actions(Path(first.args.output_dir) / "actions.jsonl")
    state = json.loads((folder / STATE_FILE).read_text())["control"]
    assert state["controllers"] == {"length_guard": {"scale": 0.5, "changed": 4}}
    assert [row["step"] for row in state["rows"]] == list(range(1, checkpoint + 1))
    saved = torch.load(folder / "optimizer.pt", weights_only=True)["param_groups"][0]["lr"]
    assert saved > 0.6e-3 * (1 - checkpoint / 8)  # the schedule's: the scale is not in the checkpoint twice
    again = build(Lengths(LENGTHS), **options)
    seen = used_learning_rates(again)
    again.train(resume_from_checkpoint=str(folder))
    assert scales(again) == SCALES
    assert read_actions(Path(again.args.output_dir) / "actions.jsonl") == actions
    assert seen[0] == pytest.approx(0.5 * 1e-3 * (1 - checkpoint / 8))


def test_warn_says_a_finding_once_also_across_a_resume(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = build(Engine(noise=1.0), max_steps=4, save_strategy="steps", save_steps=2)
    trainer.train()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[control]")]
    assert sum("critical  " in line and "Pearson" not in line for line in said) >= 1
    assert len(said) == len({line.partition(":")[2].partition(":")[0] for line in said})
    assert all(row["offpolicy/control/verdict"] == 3 for row in records(trainer))
    again = build(Engine(noise=1.0), max_steps=6)
    again.train(resume_from_checkpoint=True)
    assert "[control]" not in capsys.readouterr().out
    assert [row["step"] for row in records(again)] == [1, 2, 3, 4, 5, 6]


def test_stop_ends_the_run_with_a_checkpoint_to_go_on_from(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = build(Engine(noise=1.0), max_steps=8, control={"policy": "stop", "patience": 3})
    trainer.train()
    folder = Path(trainer.args.output_dir)
    assert [row["step"] for row in records(trainer)] == [1, 2, 3]
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-3"}
    (action,) = read_actions(folder / "actions.jsonl")
    assert (action.what, action.step) == ("stop", 3) and "3 logging steps in a row" in action.why
    assert f"the run ends here with a checkpoint in {folder}" in capsys.readouterr().out
    again = build(Engine(), max_steps=4, control="stop")
    again.train(resume_from_checkpoint=True)
    assert [row["step"] for row in records(again)] == [1, 2, 3, 4]


def test_a_healthy_run_is_not_stopped(build: Build) -> None:
    trainer = build(Engine(), max_steps=6, control={"policy": "stop", "patience": 1})
    trainer.train()
    assert len(records(trainer)) == 6
    assert all(row["offpolicy/control/verdict"] == 0 for row in records(trainer))


ESCALATION = {"chi2": [0.001, 0.002, 1e6], "dropped": [0.999, 1.0], "ess": 1e-9, "pearson": -1.0, "patience": 1}


def test_escalation_changes_the_correction_in_use_and_comes_back(build: Build) -> None:
    spec = {"policy": "act", "controllers": {"escalation": {**ESCALATION, "calm": 1, "low": 0.5, "high": 2.0}}}
    engine = Engine(noise=0.3)
    trainer = build(engine, offpolicy="measure", control=spec, max_steps=6)

    def calm_down(prompts: list[str], owner: Any) -> dict[str, Any]:
        engine.noise = 0.3 if owner.state.global_step < 3 else 0.0
        return engine(prompts, owner)

    trainer.rollout_func = calm_down
    trainer.train()
    rows = records(trainer)
    assert [row["offpolicy/control/correction_level"] for row in rows] == [1, 2, 2, 1, 0, 0]
    dropping = ["offpolicy/keep/dropped_sequence_fraction" in row for row in rows]
    weighing = ["offpolicy/weight_applied/ess_sequence" in row for row in rows]
    assert dropping == [False, True, True, True, True, False]  # from the step after the decision on
    assert weighing == [False, False, True, True, False, False]
    assert trainer.objective.correction == op.presets.get("measure").correction


def test_a_level_that_the_loss_refuses_is_left_out(build: Build) -> None:
    """PPO-IS holds current/sampling itself. Token TIS on old/sampling beside it is an error of the objective."""
    spec = {"policy": "act", "controllers": {"escalation": {**ESCALATION, "low": 0.5, "high": 2.0}}}
    loss = {"objective": {"policy_loss": {"type": "ppo_is"}}}
    trainer = build(Engine(noise=0.3), offpolicy=loss, control=spec, max_steps=4)
    trainer.train()
    rows = records(trainer)
    assert [row["offpolicy/control/correction_level"] for row in rows] == [1, 2, 2, 2]
    assert ["offpolicy/keep/dropped_sequence_fraction" in row for row in rows] == [False, True, True, True]
    assert not any("offpolicy/weight_applied/ess_sequence" in row for row in rows)


def test_a_systems_fix_stops_the_run(build: Build) -> None:
    spec = {"policy": "act", "controllers": {"escalation": {"patience": 1}}}
    trainer = build(Engine(noise=2.0), offpolicy="measure", control=spec, max_steps=6)
    trainer.train()
    actions = read_actions(Path(trainer.args.output_dir) / "actions.jsonl")
    assert [(a.what, a.after) for a in actions] == [*[("correction_level", n) for n in (1, 2, 3)], ("stop", 1)]
    assert len(records(trainer)) == 3 and list(Path(trainer.args.output_dir).glob("checkpoint-3"))


def test_ess_scales_the_step(build: Build) -> None:
    """As in VCPO: the scale of a step is the root of the ESS that the step before logged."""
    products = {"metric": "offpolicy/total/ess_sequence", "base": 1.0, "resolution": 1e-6}
    spec = {"policy": "act", "controllers": {"ess_step": products}}
    trainer = build(Engine(noise=1.0), control=spec, offpolicy="paper/tis", max_steps=3)
    trainer.train()
    for row in records(trainer):
        expected = max(row["offpolicy/total/ess_sequence"] ** 0.5, 1 / 16)
        assert row["offpolicy/control/learning_rate_scale"] == pytest.approx(expected) and expected < 0.99


@pytest.mark.parametrize("name", [None, "paper/staleness-ceiling"])
def test_the_ceiling_follows_the_lag_of_the_rows(build: Build, name: str | None) -> None:
    """Three passes over each generation batch: the lag is 0, 1, 2, and the rate was tuned for a lag of 1."""
    spec: dict[str, Any] = {"control": {"controllers": {"staleness_ceiling": {"lag": 1, "window": 1}}}}
    if name is not None:  # its window is the default: once the lag was 2, the rate stays halved for five rows
        spec = {"offpolicy": name}
    options = {"num_iterations": 3, "max_steps": 6, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    trainer = build(Engine(), **spec, **options)
    seen = used_learning_rates(trainer)
    trainer.train()
    assert [row["offpolicy/rollout/version_lag_max"] for row in records(trainer)] == [0, 1, 2, 0, 1, 2]
    expected = [1.0, 1.0, 0.5, 1.0, 1.0, 0.5] if name is None else [1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    assert scales(trainer) == expected
    assert seen == pytest.approx([1e-3 * scale for scale in [1.0, *expected[:-1]]])  # from the next step on


def test_controllers_that_cannot_work_are_refused_by_name_and_left_out_otherwise(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="must not name resync, which needs vLLM"):
        build(Engine(), control={"controllers": ["resync"]})
    with pytest.raises(ValueError, match="must not name escalation, which needs an engine with log-probs of its own"):
        build(control={"controllers": ["escalation"]})
    wide = {"preset": "paper/tis", "correction": {"normalize": "original"}}
    with pytest.raises(ValueError, match="must not name escalation, which needs a correction of row scope"):
        build(Engine(), offpolicy=wide, control={"controllers": ["escalation"]})
    trainer = build(Engine(), control="act")
    assert [item.name for item in trainer._control.spec.controllers] == ["length_guard", "ess_step", "escalation"]
    assert "control: act leaves out resync, which needs vLLM" in caplog.text


def test_nobody_watches_with_off(build: Build) -> None:
    trainer = build(Engine(noise=1.0), control="off")
    trainer.train()
    assert trainer._control is None
    assert not any("/control/" in key for row in records(trainer) for key in row)


@pytest.mark.parametrize(
    "spec",
    [
        {"control": {"policy": "act", "controllers": {}, "max_gradient_cosine": 0.0}},
        {"offpolicy": {"preset": "paper/gac", "options": {"max_cosine": 0.0}}},
    ],
    ids=["option", "preset"],
)
def test_a_gradient_too_aligned_with_the_one_before_is_projected(build: Build, spec: dict[str, Any]) -> None:
    trainer, grads = build(Engine(), **spec, max_steps=4, num_iterations=2), list[torch.Tensor]()

    class Grads(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            def note(optimizer: Any, *_: Any) -> None:
                grads.append(torch.cat([p.grad.flatten() for g in optimizer.param_groups for p in g["params"]]))

            kwargs["optimizer"].optimizer.register_step_pre_hook(note)

    trainer.add_callback(Grads())
    trainer.train()
    row = records(trainer)[1]
    assert row["offpolicy/gradient/cosine_previous"] > 0.1  # the second pass over one batch
    assert row["offpolicy/control/gradients_projected"] == 1.0
    assert abs(float(torch.nn.functional.cosine_similarity(grads[0], grads[1], dim=0))) < 1e-4


def test_the_gradient_cosine_is_logged_on_demand(build: Build) -> None:
    """The same rollouts in every step and a tiny learning rate: the same gradient again, cosine 1."""

    class Same(Engine):
        def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
            self.random.manual_seed(0)
            return super().__call__(prompts, trainer)

    options = {"control": {"gradient_cosine": True}, "max_steps": 3, "learning_rate": 1e-12, "shuffle_dataset": False}
    trainer = build(Same(), **options, num_iterations=2, steps_per_generation=2)
    trainer.train()
    values = [row.get("offpolicy/gradient/cosine_previous") for row in records(trainer)]
    assert values[0] is None and values[1] == pytest.approx(1.0, abs=1e-3)
    assert values[2] < 0.99  # another generation
