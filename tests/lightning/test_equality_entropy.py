"""TRL's entropy options and ``mask_truncated_completions`` in both trainers on the same rollouts: alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from both_trainers import assert_same_numbers, distance, keep_order, run_lightning, run_trl, trl_side
from tiny_models import PAD
from trainer_runs import Engine

pytestmark = pytest.mark.integration

STEPS, LIMIT = 3, 1e-5
ADAPTIVE = {
    "use_adaptive_entropy": True, "entropy_coef": 0.2, "entropy_target": 3.26, "entropy_coef_delta": 0.08,
    "entropy_coef_max": 0.25,
}  # fmt: skip
ON_QUANTILE = {**ADAPTIVE, "top_entropy_quantile": 0.5, "entropy_target": 3.7}
CUT = {"mask_truncated_completions": True}
ACCUMULATED = {"gradient_accumulation_steps": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # TRL's options, the module's
    "quantile": ({"top_entropy_quantile": 0.5}, {"entropy": {"top_entropy_quantile": 0.5}}),
    "bonus": ({"entropy_coef": 0.1}, {"entropy": {"entropy_coef": 0.1}}),
    "bonus_of_the_objective": ({"offpolicy": {"preset": "paper/tis", "objective": {"entropy_coef": 0.1}}}, {}),
    "adaptive": (ADAPTIVE, {"entropy": ADAPTIVE}),
    "adaptive_on_the_quantile": (ON_QUANTILE, {"entropy": ON_QUANTILE}),
    "truncated": (CUT, CUT),
    "truncated_by_response": (
        {**CUT, "loss_type": "grpo"}, {**CUT, "objective": {"aggregation": "seq_mean_token_mean"}},
    ),
}  # fmt: skip


@pytest.fixture
def build(make_args: Any, fresh_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    keep_order(monkeypatch)
    return trl_side(make_args, fresh_model, tokenizer)


def both(case: str, build: Any, folder: Path, **changed: Any) -> tuple[Any, Any, Any]:
    options, ours = CASES[case]
    theirs, rows, calls = run_trl(build, **ACCUMULATED, **options)
    settings = {"correction": options.get("offpolicy", "paper/tis"), **ours, **changed}
    watch, _ = run_lightning(folder, calls, 2, settings, {"steps_per_generation": 2})
    return theirs, rows, watch


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_metrics_and_weights_are_those_of_trl(case: str, build: Any, tmp_path: Path) -> None:
    theirs, rows, watch = both(case, build, tmp_path)
    assert len(rows) == len(watch.logs) == STEPS
    for step in range(STEPS):
        assert distance(watch.gradients[step], theirs.gradients[step]) < LIMIT
        assert distance(watch.weights[step], theirs.weights[step]) < LIMIT
        assert watch.logs[step]["loss"] == pytest.approx(rows[step]["loss"], rel=LIMIT, abs=LIMIT)
        assert_same_numbers(watch.logs[step], rows[step])
    bonus = not case.startswith(("quantile", "truncated"))
    assert all(("entropy_coef" in row and "policy_loss" in row) == bonus for row in rows)
    if case == "adaptive":
        assert [row["entropy_coef"] for row in rows] == pytest.approx([0.12, 0.2, 0.25]), "down, up, up to its bound"
    if "truncated" in case:
        assert [row["completions/clipped_ratio"] for row in rows] == [0.375, 0.25, 0.0]
        assert all(row["offpolicy/rollout/distinct_fraction"] == 1 for row in rows)


@pytest.mark.parametrize(
    ("case", "changed"),
    [
        ("quantile", {"entropy": {}}),
        ("bonus", {"entropy": {"entropy_coef": -0.1}}),
        ("adaptive", {"entropy": {**ADAPTIVE, "entropy_target": 0.2}}),
        ("truncated", {"mask_truncated_completions": False}),
    ],
)
def test_another_setting_is_seen(case: str, changed: dict[str, Any], build: Any, tmp_path: Path) -> None:
    """The comparison above is not satisfied by a module that ignores the option."""
    theirs, _, watch = both(case, build, tmp_path, **changed)
    assert max(map(distance, watch.gradients, theirs.gradients)) > 100 * LIMIT


class EndsWithPadding(Engine):
    """Every third completion of the longest length ends with the padding token."""

    def __init__(self) -> None:
        super().__init__(shift=0.2, noise=0.3)
        self.drawn = 0

    def _words(self) -> list[int]:
        words, self.drawn = super()._words(), self.drawn + 1
        return [*words[:-1], PAD] if self.drawn % 3 == 0 else words


@pytest.mark.parametrize("cut", [True, False])
def test_a_completion_that_ends_with_padding_has_ended(build: Any, tmp_path: Path, cut: bool) -> None:
    options = {"mask_truncated_completions": cut}
    theirs, rows, calls = run_trl(build, engine=EndsWithPadding(), **ACCUMULATED, **options)
    watch, _ = run_lightning(tmp_path, calls, 2, options, {"steps_per_generation": 2})
    ends = [ids[-1] for call in calls for ids in call["completion_ids"]]
    assert ends.count(PAD) >= 6
    for step in range(STEPS):
        assert distance(watch.gradients[step], theirs.gradients[step]) < LIMIT
        assert_same_numbers(watch.logs[step], rows[step])
