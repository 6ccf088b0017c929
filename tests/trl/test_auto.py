"""``offpolicy: auto`` in real, tiny TRL runs: a mismatch that grows, a clean run, a resume, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import Engine, records

from trl_offpolicy import presets
from trl_offpolicy.control import read_actions
from trl_offpolicy.objective.coefficients import STATE_FILE
from trl_offpolicy.presets.parsing import parse_preset
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

pytestmark = pytest.mark.integration

Build = Callable[..., OffPolicyGRPOTrainer]
AUTO = {"preset": "auto", "options": {"patience": 2}}
QUIET, LOUD = 0.0, 0.6
WIDE = {"num_generations": 2, "gradient_accumulation_steps": 4}
"""16 responses of 8 prompts in a generation."""


class Growing(Engine):
    """Responses of the trainer's own policy, scored with a noise that the optimizer step determines."""

    def __init__(self, noises: list[float]) -> None:
        super().__init__()
        self.noises = noises

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        self.noise = self.noises[trainer.state.global_step]
        return super().__call__(prompts, trainer)


def column(trainer: OffPolicyGRPOTrainer, name: str) -> list[float | None]:
    return [row.get(f"offpolicy/auto/{name}") for row in records(trainer)]


def chosen(trainer: OffPolicyGRPOTrainer) -> list[str]:
    """The candidate in use after each logged step."""
    rows = records(trainer)
    suffix = "/chosen"
    return [
        next(key.split("/")[2] for key in row if key.endswith(suffix) and row[key] == 1.0 and "/auto/" in key)
        for row in rows
    ]


def test_a_clean_run_needs_no_correction_and_stays_there(build: Build) -> None:
    trainer = build(Engine(), offpolicy="auto", max_steps=5)
    trainer.train()
    assert chosen(trainer) == ["none"] * 5
    assert column(trainer, "revisions") == [0.0] * 5
    assert trainer.objective.correction == presets.get("measure").correction
    (action,) = read_actions(Path(trainer.args.output_dir) / "actions.jsonl")
    assert (action.step, action.what, action.before, action.after) == (0, "correction_choice", -1, 0)


def test_it_moves_where_the_mismatch_grows(build: Build) -> None:
    trainer = build(Growing([QUIET] * 2 + [LOUD] * 4), offpolicy=AUTO, max_steps=6, **WIDE)
    trainer.train()
    names = chosen(trainer)
    # a generation is judged when the next one is sampled: those of steps 3 and 4 move it before step 5
    assert names[:4] == ["none"] * 4 and names[4] != "none"
    used = [row.get("offpolicy/weight_applied/ess_token") is not None for row in records(trainer)]
    assert used == [name != "none" for name in names]  # from the step on in which it is logged as chosen
    first, moved, *_ = read_actions(Path(trainer.args.output_dir) / "actions.jsonl")
    assert (first.step, first.after, moved.step, moved.before) == (0, 0, 4, 0)
    assert f"{names[4]}: missed" in moved.why and "before none: missed" in moved.why
    # the line names the setting that makes the choice the only one
    setting = json.loads(moved.why.rpartition("offpolicy: ")[2])
    taken = trainer._auto.candidates[int(moved.after)]
    assert parse_preset(setting, where="offpolicy")[0].correction == taken.correction


def test_the_first_generation_decides_before_its_own_loss(build: Build) -> None:
    trainer = build(Growing([LOUD] * 3), offpolicy="auto", max_steps=1)
    trainer.train()
    (row,) = records(trainer)
    assert chosen(trainer) != ["none"]
    assert row["offpolicy/weight_applied/mean"] != 1.0
    # what the loss step measures of the choice is what the choice was made by
    (name,) = chosen(trainer)
    for ours, theirs in {"missed": "missed", "ess": "ess", "second_moment": "second_moment"}.items():
        assert row[f"offpolicy/auto/{name}/{theirs}"] == pytest.approx(row[f"offpolicy/estimator/{ours}"], rel=1e-4)
    info = json.loads((Path(trainer.args.output_dir) / "run.json").read_text())
    assert info["preset"] == "auto" and "sequence_tis_10" in info["candidates"]


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}])
def test_a_resumed_run_decides_as_if_it_had_not_stopped(build: Build, options: dict[str, Any]) -> None:
    class Fixed(Growing):
        def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
            self.random.manual_seed(trainer.state.global_step)
            return super().__call__(prompts, trainer)

    noises = [QUIET] * 3 + [LOUD] * 9  # the generation before the checkpoint is the first of the streak
    common = {"offpolicy": AUTO, "max_steps": 12, "learning_rate": 1e-4, **WIDE, **options}
    first = build(Fixed(noises), **common, save_strategy="steps", save_steps=4)
    first.train()
    folder = Path(first.args.output_dir)
    before, actions = chosen(first), read_actions(folder / "actions.jsonl")
    assert before[0] == "none" != before[-1]
    state = json.loads((folder / "checkpoint-4" / STATE_FILE).read_text())["auto"]
    assert state["choice"] == "none" and state["better"]["none"] == 0
    again = build(Fixed(noises), **common)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert chosen(again) == before
    assert read_actions(folder / "actions.jsonl") == actions


def test_it_costs_one_forward_of_one_generation_in_the_whole_run(build: Build) -> None:
    def forwards(offpolicy: Any) -> int:
        trainer = build(Engine(noise=0.3), offpolicy=offpolicy, max_steps=4)
        count = 0

        def counted(*_: Any) -> None:
            nonlocal count
            count += torch.is_grad_enabled() or not sampling

        sampling = False
        rollout = trainer.rollout_func

        def sample(prompts: Any, owner: Any) -> Any:
            nonlocal sampling
            sampling = True
            try:
                return rollout(prompts, owner)
            finally:
                sampling = False

        trainer.rollout_func = sample
        trainer.model.register_forward_pre_hook(counted)
        trainer.train()
        return count

    assert forwards("auto") == forwards("paper/tis") + 2  # two micro-batches


def test_what_cannot_be_combined_is_refused(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="use_vllm"):
        build(offpolicy="auto")
    with pytest.raises(ValueError, match="must not name escalation, which needs a configured correction"):
        build(Engine(), offpolicy="auto", control={"controllers": ["escalation"]})
    with pytest.raises(ValueError, match=r"offpolicy\.correction\.weight must be None with auto"):
        build(Engine(), offpolicy={"preset": "auto", "correction": {"weight": {"type": "raw"}}})
    with pytest.raises(ValueError, match="ess_flor is not an option"):
        build(Engine(), offpolicy={"preset": "auto", "options": {"ess_flor": 0.3}})
    build(Engine(), offpolicy="auto", control="act")
    assert "control: act leaves out escalation, which needs a configured correction" in caplog.text


def test_the_report_shows_the_choice(build: Build) -> None:
    trainer = build(Growing([LOUD] * 3), offpolicy="auto", max_steps=2, write_report=True)
    trainer.train()
    page = (Path(trainer.args.output_dir) / "report.html").read_text()
    assert "Choice of the correction" in page and f"<td>{chosen(trainer)[-1]}" in page
