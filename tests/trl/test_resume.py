"""A resumed run of the TRL trainer goes on as if it had not stopped: draws, loss, weights and logged numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from both_trainers import WatchTRL
from tiny_models import tiny_prompts
from trainer_runs import TIMES, records, rollouts

pytestmark = pytest.mark.integration

STEPS, STOP = 4, 2
CASES: dict[str, dict[str, Any]] = {
    "aligned": {},
    "old_log_probs": {"gradient_accumulation_steps": 1, "steps_per_generation": 2},
    "at_an_evaluation": {"eval_strategy": "steps", "eval_steps": 1},
    "kl_that_adapts": {
        "offpolicy": {
            "preset": "measure",
            "objective": {"kl": {"coef": {"type": "adaptive", "coef": 0.1, "target": 0.01, "horizon": 99}}},
        }
    },
}
NOT_COMPARED = {*TIMES, "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}


def run(build: Callable[..., Any], case: str, **options: Any) -> tuple[Any, WatchTRL]:
    """A trainer whose model samples by transformers' ``generate``, and what it will see."""
    given = {"learning_rate": 1e-2, "max_steps": STEPS, "save_strategy": "steps", "save_steps": STOP, "seed": 7}
    trainer = build(None, **{**given, **CASES[case], **options})
    trainer.eval_dataset = tiny_prompts(3)
    watch = WatchTRL(trainer.model)
    trainer.add_callback(watch)
    return trainer, watch


def drawn(trainer: Any) -> list[list[int]]:
    """The completions of the later steps, in the order in which they are recorded."""
    table = rollouts(trainer)
    return [ids.tolist() for ids in table[table["step"] >= STOP].completion_ids]


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_goes_on_exactly(build: Callable[..., Any], case: str) -> None:
    whole, seen = run(build, case)
    whole.train()
    expected, completions = records(whole), drawn(whole)
    rest, again = run(build, case)
    torch.manual_seed(99)  # other random numbers, until those of the checkpoint are back
    rest.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / f"checkpoint-{STOP}"))
    assert len(completions) == 8 * (STEPS - STOP) // CASES[case].get("steps_per_generation", 1) and (
        drawn(rest) == completions
    )
    found = records(rest)
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        assert set(row) == set(wanted)
        for name in set(row) - NOT_COMPARED:
            assert row[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), name
    assert len(again.weights) == STEPS - STOP
    for mine, theirs in zip(again.weights, seen.weights[STOP:], strict=True):
        assert all(torch.equal(mine[name], weight) for name, weight in theirs.items())


def test_without_the_random_state_the_test_above_would_fail(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = run(build, "aligned")
    whole.train()
    completions = drawn(whole)
    rest, _ = run(build, "aligned")
    monkeypatch.setattr(rest, "_load_rng_state", lambda _: torch.manual_seed(99))
    rest.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / f"checkpoint-{STOP}"))
    assert drawn(rest) != completions


def test_a_run_that_is_complete_trains_no_further(build: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    """A job that is started again with ``--resume true`` after its end; transformers took one step more."""
    whole, _ = run(build, "aligned")
    whole.train()
    weights = [p.detach().clone() for p in whole.model.parameters()]
    for most in (STEPS, STOP):  # also where fewer steps are asked for than were taken
        again, seen = run(build, "aligned", max_steps=most)
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == STEPS and not seen.weights
        assert all(torch.equal(a, b) for a, b in zip(weights, again.model.parameters(), strict=True))
        assert f"has taken {STEPS} steps, and max_steps is {most}" in caplog.text
