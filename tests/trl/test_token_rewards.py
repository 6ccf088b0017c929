"""Rewards by token from a ``rollout_func`` in the TRL trainer: the advantages by plain loops, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from scripted_agents import add
from tiny_models import score_last_word, tiny_prompts
from token_reward_runs import Judged, judged
from trainer_runs import GENERATIONS, Engine, generation_batches

from trl_offpolicy.rollouts.replay import ReplayBuffer
from trl_offpolicy.rollouts.screening import RolloutError
from trl_offpolicy.trl.replay import ReplayGRPOTrainer
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

pytestmark = pytest.mark.integration

Build = Callable[..., Any]
ON: dict[str, Any] = {"token_rewards": True}


def plain_rows(output: dict[str, Any]) -> tuple[list[float], list[list[float]], list[list[bool]]]:
    """Of each row the reward of the reward function, the rewards of its tokens, and which of these are trained on."""
    attention, ids = output["completion_mask"].tolist(), output["completion_ids"].tolist()
    tools = output["tool_mask"].tolist() if "tool_mask" in output else attention
    mask = [[bool(a and b) for a, b in zip(*pair, strict=True)] for pair in zip(attention, tools, strict=True)]
    return output["rewards"].tolist(), [judged(row) for row in ids], mask


def group_advantages(totals: list[float]) -> list[float]:
    """(r - mean) / (std + 1e-4) of each group of neighbours."""
    found = []
    for start in range(0, len(totals), GENERATIONS):
        group = totals[start : start + GENERATIONS]
        mean = sum(group) / len(group)
        std = math.sqrt(sum((one - mean) ** 2 for one in group) / (len(group) - 1))
        found += [(one - mean) / (std + 1e-4) for one in group]
    return found


@pytest.mark.parametrize("masked", [False, True])
def test_a_group_compares_the_sums_of_its_responses(build: Build, masked: bool) -> None:
    """Also where a token is no token of the model: what it has counts 0."""
    trainer = build(Judged(noise=0.2, masked=masked), offpolicy="paper/tis", **ON)
    batches = generation_batches(trainer)
    trainer.train()
    assert len(batches) == 2
    for output in batches:
        rewards, by_token, mask = plain_rows(output)
        assert masked == ("tool_mask" in output)
        totals = [
            reward + sum(one for one, here in zip(*pair, strict=True) if here)
            for reward, *pair in zip(rewards, by_token, mask, strict=True)
        ]
        assert output["advantages"].tolist() == pytest.approx(group_advantages(totals), abs=1e-4)
        assert output["advantages"].tolist() != pytest.approx(group_advantages(rewards), abs=0.05)


def test_reinforce_plus_plus_returns_them_by_token(build: Build) -> None:
    offpolicy = {"preset": "paper/tis", "advantages": {"type": "reinforce_plus_plus", "discount": 0.9}}
    trainer = build(Judged(noise=0.2, masked=True), offpolicy=offpolicy, **ON)
    batches = generation_batches(trainer)
    trainer.train()
    for output in batches:
        returns: dict[tuple[int, int], float] = {}
        for row, (reward, by_token, mask) in enumerate(zip(*plain_rows(output), strict=True)):
            later, is_last = 0.0, True
            for place in range(len(mask) - 1, -1, -1):
                if not mask[place]:
                    continue
                own = by_token[place] + (reward if is_last else 0.0)
                later, is_last = own + 0.9 * later, False
                returns[row, place] = later
        mean = sum(returns.values()) / len(returns)
        variance = sum((one - mean) ** 2 for one in returns.values()) / (len(returns) - 1)
        found = output["advantages"].tolist()
        for (row, place), value in returns.items():
            assert found[row][place] == pytest.approx((value - mean) / math.sqrt(variance + 1e-8), abs=1e-4)


def test_a_dropped_reply_has_neither_tokens_nor_rewards(build: Build) -> None:
    class Broken(Judged):
        def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
            output = super().__call__(prompts, trainer)
            output["completion_ids"][2], output["logprobs"][2] = [], []  # its rewards are those of what it was
            return output

    trainer = build(Broken(noise=0.2), offpolicy="paper/tis", on_bad_rollout="drop", max_steps=1, **ON)
    batches = generation_batches(trainer)
    trainer.train()
    rewards, by_token, mask = plain_rows(batches[0])
    totals = [
        reward + sum(one for one, here in zip(*pair, strict=True) if here)
        for reward, *pair in zip(rewards, by_token, mask, strict=True)
    ]
    others = [totals[i] for i in (0, 1, 3)]
    mean = sum(others) / 3
    std = math.sqrt(sum((one - mean) ** 2 for one in others) / 2)
    expected = [(totals[i] - mean) / (std + 1e-4) if i != 2 else 0.0 for i in range(4)]
    assert batches[0]["advantages"][:4].tolist() == pytest.approx(expected, abs=1e-4)


class Changed(Engine):
    """A ``rollout_func`` whose column is what ``change`` makes of the completions."""

    def __init__(self, change: Callable[[list[list[int]]], Any]) -> None:
        super().__init__()
        self.change = change

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        return {**output, "token_rewards": self.change(output["completion_ids"])}


@pytest.mark.parametrize(
    ("change", "wanted", "error", "message"),
    [
        (lambda ids: None, True, ValueError, "token_rewards must be a column of what the rollout_func returns"),
        (lambda ids: 0.5, True, TypeError, "token_rewards must be a list with one list per completion, but got float"),
        (
            lambda ids: [*([0.0] * len(row) for row in ids[:-1]), [0.0] * (len(ids[-1]) + 1)],
            True,
            ValueError,
            r"token_rewards must have one number for each token of completion_ids, (\d+) in row 7, but got \d+",
        ),
        (lambda ids: [judged(row) for row in ids], False, ValueError, "token_rewards must be true to learn from the"),
        (
            lambda ids: [[*judged(row)[1:], math.inf] for row in ids],
            True,
            RolloutError,  # on all ranks
            r"token_rewards must be finite, but token \d+ of row 0 has inf",
        ),
        (lambda ids: [judged(row) for row in ids[:-1]], True, Exception, r"must return 8 entries.*token_rewards 7"),
    ],
)
def test_a_column_that_cannot_be_read_ends_the_run(
    build: Build, change: Any, wanted: bool, error: type[Exception], message: str
) -> None:
    trainer = build(Changed(change), offpolicy="measure", token_rewards=wanted)
    with pytest.raises(error, match=message):
        trainer.train()


def test_what_brings_no_rewards_by_token_is_refused(
    build: Build, make_args: Any, fresh_model: Any, tokenizer: Any
) -> None:
    with pytest.raises(ValueError, match=r"^token_rewards must be false without a rollout_func, but got true: neither"):
        build(**ON)
    with pytest.raises(NotImplementedError, match=r"^token_rewards must be false with the advantages of GDPO"):
        build(Judged(), offpolicy={"preset": "measure", "advantages": "gdpo"}, **ON)
    with pytest.raises(ValueError, match=r"^multi_objective_aggregation must be .* with token_rewards \("):
        build(Judged(), multi_objective_aggregation="normalize_then_sum", **ON)
    with pytest.raises(ValueError, match=r"^token_rewards must be True or False"):
        make_args(token_rewards="yes")
    given = {"train_dataset": tiny_prompts(), "processing_class": tokenizer, "rollout_func": Judged()}
    with pytest.raises(NotImplementedError, match=r"^token_rewards must be false with tools, but got true"):
        OffPolicyGRPOTrainer(fresh_model(), score_last_word, make_args(**ON), tools=[add], **given)


def test_a_replay_buffer_refuses_them(make_args: Any, fresh_model: Any, tokenizer: Any, tmp_path: Any) -> None:
    given = {"train_dataset": tiny_prompts(), "processing_class": tokenizer, "rollout_func": Judged()}
    with ReplayBuffer(tmp_path / "replay", max_rows=1000) as buffer:
        args = make_args(**ON, offpolicy="paper/tis")
        with pytest.raises(NotImplementedError, match="does not work with token_rewards"):
            ReplayGRPOTrainer(fresh_model(), score_last_word, args, **given, replay=buffer, replay_groups=2)
