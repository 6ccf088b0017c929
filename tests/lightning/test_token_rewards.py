"""Rewards by token in Lightning: as in the TRL trainer, from an engine or a rollout function; and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from both_trainers import (
    GRADIENT_LIMIT,
    PROMPTS,
    RATE,
    STEPS,
    assert_same_numbers,
    distance,
    run_lightning,
    run_trl,
)
from lightning_runs import OwnMismatch, Played, Watch, data, module, trainer
from token_reward_runs import Judged

from trl_offpolicy.rollouts.screening import RolloutError

LEAST = 1e-3
"""What the rewards by token change at least, by the same distance; ten times the largest difference of the trainers."""
REPLAY = {"groups": 2, "max_rows": 100}
KL = {"kl": {"coef": 0.3, "estimator": "k1", "place": "reward"}}
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "paper/tis"},
    "reinforce++": {"preset": "paper/tis", "advantages": {"type": "reinforce_plus_plus", "discount": 0.9}},
    "with the KL in the reward": {"preset": "paper/tis", "objective": KL},
    "by token, with the KL in the reward": {
        "preset": "paper/tis", "advantages": "reinforce_plus_plus", "objective": KL,
    },
    "a kept baseline": {"preset": "paper/tis", "correction": {"keep": [{"type": "ratio_band", "low": 0.7, "high": 1.6}],
                                                             "baseline": "kept"}},
}  # fmt: skip


@pytest.mark.integration
@pytest.mark.parametrize("name", METHODS)
def test_both_trainers_learn_the_same_from_them(name: str, build_trl: Any, tmp_path: Path) -> None:
    spec, options = METHODS[name], {"gradient_accumulation_steps": 1, "num_iterations": 2}
    engine = Judged(shift=0.2, noise=0.3)
    theirs, rows, calls = run_trl(build_trl, engine=engine, **options, offpolicy=spec, token_rewards=True)
    settings = {"correction": spec, "token_rewards": True}
    watch, _ = run_lightning(tmp_path, calls, 1, settings, {"num_iterations": 2})
    for step in range(STEPS):
        assert distance(watch.gradients[step], theirs.gradients[step]) < GRADIENT_LIMIT
        assert distance(watch.weights[step], theirs.weights[step]) < GRADIENT_LIMIT
        assert_same_numbers(watch.logs[step], rows[step])
    plain, _, _ = run_trl(build_trl, **options, offpolicy=spec)
    assert distance(theirs.gradients[0], plain.gradients[0]) > LEAST


def by_rollout(judge: Judged) -> Any:
    """TRL's ``rollout_func`` as a function for Lightning."""

    def rollout(prompts: Any, engine: Any, sampling: Any, tokenizer: Any) -> Any:
        return judge(prompts, SimpleNamespace(processing_class=tokenizer, model=engine.source.model))

    return rollout


@pytest.mark.integration
def test_a_rollout_function_brings_them_with_output_of_tools(build_trl: Any, tmp_path: Path) -> None:
    """The same function in both trainers; a token outside the mask counts 0 in both."""
    judge = Judged(noise=0.3, masked=True)
    theirs, _, _ = run_trl(build_trl, engine=judge, gradient_accumulation_steps=1, token_rewards=True)
    watch = Watch()
    ours = module(
        OwnMismatch(), rollout=by_rollout(Judged(noise=0.3, masked=True)), correction="paper/tis", token_rewards=True,
        optimizer=partial(torch.optim.SGD, lr=RATE),
    )  # fmt: skip
    trainer(tmp_path, callbacks=[watch], max_steps=STEPS).fit(ours, data(PROMPTS))
    for step in range(STEPS):
        assert distance(watch.gradients[step], theirs.gradients[step]) < GRADIENT_LIMIT


def answers(**changes: Any) -> list[dict[str, Any]]:
    """One call of an engine: a group of four completions of two tokens."""
    ids = [[5, 6], [7, 8], [9, 10], [11, 12]]
    call = {"prompt_ids": [[3, 4]] * 4, "completion_ids": ids, "logprobs": [[-1.0, -1.0]] * 4}
    return [{**call, "token_rewards": [[0.5, 0.25]] * 4, **changes}]


@pytest.mark.parametrize(
    ("changes", "wanted", "message"),
    [
        ({"token_rewards": None}, True, "token_rewards must be a column of what the engine returns"),
        ({}, False, "token_rewards must be true to learn from the column token_rewards that the engine returned"),
        ({"token_rewards": [[0.5, 0.25]] * 3 + [[0.5]]}, True, "token_rewards must have .* but row 3 has 1 for 2 tok"),
        ({"token_rewards": [[0.5, float("nan")]] * 4}, True, "token_rewards must be finite, but token 1 of row 0"),
    ],
)
def test_a_column_that_cannot_be_read_ends_the_run(
    changes: dict[str, Any], wanted: bool, message: str, tmp_path: Path
) -> None:
    ours = module(Played(answers(**changes)), correction="measure", token_rewards=wanted)
    error = RolloutError if "finite" in message else ValueError  # the first is one on all ranks
    with pytest.raises(error, match=message):
        trainer(tmp_path, max_steps=1).fit(ours, data())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {},
            ValueError,
            r"^token_rewards must be false with engine 'transformers' and without a rollout, but got true",
        ),
        ({"engine": {"type": "server"}}, ValueError, r"^token_rewards must be false with engine 'server' and without"),
        (
            {"engine": Played([]), "advantages": "gdpo"},
            NotImplementedError,
            r"^token_rewards must be false with the adv",
        ),
        (
            {
                "engine": Played([]),
                "objective": {"policy_loss": {"type": "oapl", "beta": 1.0}},
                "correction": "measure",
            },
            NotImplementedError,
            r"^token_rewards must be false with OAPL, but got true: it reads rewards and group_rewards, which hold no",
        ),
        (
            {"engine": Played([]), "advantages": "remax"},
            NotImplementedError,
            r"^advantages must not be 'remax' with token_rewards",
        ),
        ({"engine": Played([]), "replay": REPLAY}, NotImplementedError, "replay does not work with token_rewa"),
        (
            {"engine": {"type": "server"}, "rollout": by_rollout(Judged()), "async_rollouts": 1},
            NotImplementedError,
            r"^token_rewards must be false with async_rollouts, but got true",
        ),
        ({"engine": Played([]), "token_rewards": 1}, ValueError, r"^token_rewards must be True or False"),
    ],
)
def test_what_does_not_go_with_them_is_refused(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        module(**{"token_rewards": True, **options})
