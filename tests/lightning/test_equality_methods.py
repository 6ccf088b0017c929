"""Young methods by the names of their presets: the TRL trainer and the Lightning module compute the same with them.

Presets that set the trainer or the engine are tested by name where those are: test_control.py, test_ahead.py,
test_simulated.py, test_deliberate.py, test_vllm.py and their siblings in tests/trl and tests/engines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from both_trainers import (
    GRADIENT_LIMIT,
    STEPS,
    assert_same_numbers,
    distance,
    keep_order,
    run_lightning,
    run_trl,
)

METHODS: dict[str, dict[str, Any]] = {  # settings with which each of them acts on rollouts of six tokens
    "paper/kpop": {"high": 0.02},
    "paper/cppo": {"high": 0.02, "budget": 0.002},
    "paper/mu-grpo": {"low": 0.7},
    "paper/p3o": {},
    "paper/fipo": {},
    "paper/dcmdp": {"coef": 50.0, "max_coef": 100.0},
    "paper/minpro-policy": {},
    "paper/vcpo": {},
    "prime-rl/probability-difference": {"low": -0.02},
}
OTB = {"type": "optimal_token_baseline", "is_aware": True, "weigh": "path"}
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of a part, beside the same part without them
    "topr_baseline": (
        {"preset": "measure", "objective": {"policy_loss": {"type": "topr", "baseline": 0.3}}},
        {"preset": "measure", "objective": {"policy_loss": "topr"}},
    ),
    "aspo_high": (
        {"objective": {"policy_loss": {"type": "aspo", "high": 0.005}}}, {"objective": {"policy_loss": "aspo"}},
    ),
    "kl_cov_k3": (
        {"objective": {"policy_loss": {"type": "kl_cov", "fraction": 0.3, "coef": 5.0, "penalty": "k3"}}},
        {"objective": {"policy_loss": {"type": "kl_cov", "fraction": 0.3, "coef": 5.0}}},
    ),
    "otb_path": ({"advantages": OTB}, {"advantages": {**OTB, "weigh": "token"}}),
}  # fmt: skip
AT_THE_SECOND_STEP = {"paper/fipo"}
"""Plain PPO at the first step on a batch."""
LEAST = 1e-3
"""What a method changes at least, by the same distance; ten times the largest difference of the two trainers."""


@pytest.mark.integration
@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_the_same_in_both_trainers_and_does_something(name: str, build_trl: Any, tmp_path: Path) -> None:
    """Two steps on each batch of rollouts, so that the policy has moved at every second one."""
    spec, twice = {"preset": name, "options": METHODS[name]}, {"num_iterations": 2}
    theirs, rows, calls = run_trl(build_trl, gradient_accumulation_steps=1, **twice, offpolicy=spec)
    watch, _ = run_lightning(tmp_path, calls, 1, {"correction": spec}, twice)
    assert len(watch.logs) == len(rows) == STEPS
    for step in range(STEPS):
        assert distance(watch.gradients[step], theirs.gradients[step]) < GRADIENT_LIMIT
        assert distance(watch.weights[step], theirs.weights[step]) < GRADIENT_LIMIT
        assert_same_numbers(watch.logs[step], rows[step])

    plain, _, _ = run_trl(build_trl, gradient_accumulation_steps=1, **twice, offpolicy="measure")
    apart = [distance(theirs.gradients[step], plain.gradients[step]) for step in range(2)]
    if name in AT_THE_SECOND_STEP:
        assert apart[0] < GRADIENT_LIMIT and apart[1] > LEAST
    else:
        assert apart[0] > LEAST


@pytest.mark.integration
@pytest.mark.parametrize("name", PARTS)
def test_an_option_of_a_part_is_the_same_in_both_trainers_and_does_something(
    name: str, build_trl: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The covariance is over the tokens of a micro-batch, so both split a batch in the order of its rows."""
    keep_order(monkeypatch)
    twice = {"num_iterations": 2}
    spec, without = ({"preset": "paper/tis", **changed} for changed in PARTS[name])
    theirs, rows, calls = run_trl(build_trl, gradient_accumulation_steps=1, **twice, offpolicy=spec)
    watch, _ = run_lightning(tmp_path, calls, 1, {"correction": spec}, twice)
    for step in range(STEPS):
        assert distance(watch.gradients[step], theirs.gradients[step]) < GRADIENT_LIMIT
        assert distance(watch.weights[step], theirs.weights[step]) < GRADIENT_LIMIT
        assert_same_numbers(watch.logs[step], rows[step])
    plain, _, _ = run_trl(build_trl, gradient_accumulation_steps=1, **twice, offpolicy=without)
    apart = [distance(theirs.gradients[step], plain.gradients[step]) for step in range(2)]
    assert max(apart) > LEAST, apart
