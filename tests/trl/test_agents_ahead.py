"""Agents that the TRL trainer samples ahead: this kit's loop in flight, in the place of TRL's in turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_runs import TOOL_WORDS, Library, closed, conversations, count_letters, first_prompts, lookup, tool_tokenizer
from both_trainers import ENGINE_ONLY
from datasets import Dataset
from rollouts.ahead.fake_server import (
    BEHIND_SERVER,
    FakeServer,
    bad_later_turns,
    fail_later_turns,
    lags_by_step,
    server_class,
)
from trainer_runs import TIMES, records, rollouts

from trl_offpolicy.trl import engine as trl_engines
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

pytestmark = pytest.mark.integration

STEPS = 5
FINISH = {"lag": 2, "partial": "finish"}
WAIT, CROSSING = "offpolicy/rollout/wait_seconds", "offpolicy/rollout/cross_version_fraction"
LEFT_OUT = {*TIMES, *ENGINE_ONLY, WAIT, CROSSING, "offpolicy/post_tool/kl_k3_ratio"}
"""Not compared: times, what is logged on one side alone, and a quotient of rounding errors."""
LIBRARY = {"environment_factory": Library, "reward_funcs": None}


@pytest.fixture
def run(make_args: Any, fresh_model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """``run(async_rollouts, server=..., trainer's arguments, **options)``: the trained trainer and its server."""

    def train(
        ahead: Any,
        *,
        server: dict[str, Any] | None = None,
        folder: str = "run",
        resume: bool = False,
        reward_funcs: Any = count_letters,
        tools: Any = None,
        environment_factory: Any = None,
        **options: Any,
    ) -> tuple[Any, FakeServer]:
        made: list[FakeServer] = []
        monkeypatch.setattr(trl_engines, "ServerEngine", server_class(fresh_model(), made, **(server or {})))
        given = {
            **BEHIND_SERVER, "async_rollouts": ahead, "output_dir": str(tmp_path / folder), "max_steps": STEPS,
            "learning_rate": 0.02, "optim": "sgd", "max_completion_length": 24, "max_tool_calling_iterations": 2,
            "check_token_ids": "raise", "shuffle_dataset": False, **options,
        }  # fmt: skip
        trainer = OffPolicyGRPOTrainer(
            fresh_model(), reward_funcs, make_args(**given), train_dataset=Dataset.from_list(conversations(16)),
            eval_dataset=Dataset.from_list(conversations(1)), processing_class=tool_tokenizer(),
            tools=tools or (None if environment_factory else [lookup]), environment_factory=environment_factory,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer, made[0]

    return train


def lags(trainer: Any) -> list[list[int]]:
    """By optimizer step: the lags of the rows' tokens, without repetition."""
    return lags_by_step(rollouts(trainer))


def groups(trainer: Any) -> list[set[str]]:
    """The prompts of every generation batch that was learned from, in order."""
    return [set(part.prompt) for _, part in rollouts(trainer).groupby("step")]


def assert_tools_are_masked(trainer: Any) -> None:
    frame = rollouts(trainer)
    called = 0
    for row in frame.itertuples():
        tool = ~row.completion_mask
        assert not row.weights[tool].any() and not row.sampling_per_token_logps[tool].any()
        called += tool.any()
        assert all(word in row.completion_ids[tool] for word in TOOL_WORDS) == tool.any()
    assert 0.2 * len(frame) < called < len(frame)


@pytest.mark.parametrize("options", [{}, LIBRARY, {**LIBRARY, "reward_funcs": count_letters}])
def test_without_lag_it_is_trls_own_loop(run: Any, options: dict[str, Any]) -> None:
    """The loops are two, the numbers one: rewards, masks, turns, calls and failures."""
    in_turn, ahead = (run(lag, folder=str(lag), **options)[0] for lag in (None, 0))

    for ours, theirs in zip(records(ahead), records(in_turn), strict=True):
        expected = {key: value for key, value in theirs.items() if key not in LEFT_OUT}
        seen = {key: value for key, value in ours.items() if key not in LEFT_OUT}
        assert seen == pytest.approx(expected, rel=1e-3, abs=5e-4)
        assert ours["tools/call_frequency"] > 0 and WAIT in ours
    by_row = [rollouts(one).sort_values(["step", "group_id", "reward"], kind="stable") for one in (ahead, in_turn)]
    for name in ("prompt", "completion", "reward"):
        assert by_row[0][name].tolist() == by_row[1][name].tolist(), name
    for ours, theirs in zip(ahead.model.parameters(), in_turn.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert lags(ahead) == [[0]] * STEPS
    assert_tools_are_masked(ahead)


@pytest.mark.parametrize("lag", [1, 2])
def test_episodes_are_sampled_lag_generations_before(run: Any, lag: int) -> None:
    """Scored with the weights of each token's version, the trainer agrees with the engine to the last digit."""
    in_turn = groups(run(0, folder="turn")[0])
    trainer, server = run({"lag": lag, "partial": "finish", "old_logps": "snapshot"})

    assert groups(trainer) == in_turn
    assert lags(trainer) == [[min(step, lag)] for step in range(STEPS)]
    assert len(server.asked) == STEPS * 2  # nothing for after the end
    for step, row in enumerate(records(trainer)):
        assert row["offpolicy/mismatch/logp_diff_max"] < 2e-5
        assert (row["offpolicy/staleness/kl_k3"] > 1e-6) == (step > 0)
        assert row["offpolicy/rollout/retokenised_fraction"] == 0.0
        assert row["tools/call_frequency"] > 0 and row["tools/failure_frequency"] == 0
    assert_tools_are_masked(trainer)


def test_a_turn_that_is_cut_goes_on_under_the_new_weights(run: Any) -> None:
    cut = {"free": first_prompts(), "before_cut": 3}
    trainer, _ = run({"lag": 2, "partial": "continue", "old_logps": "snapshot"}, server=cut)

    assert max(map(max, lags(trainer))) == 2
    for step, row in enumerate(records(trainer)):
        assert row["offpolicy/mismatch/logp_diff_max"] < 2e-5
        assert row[CROSSING] == float(step > 0)
    assert_tools_are_masked(trainer)


def test_each_batch_in_flight_has_its_own_environments(run: Any) -> None:
    Library.made = 0
    trainer, _ = run(FINISH, **LIBRARY)

    assert lags(trainer) == [[min(step, 2)] for step in range(STEPS)]
    for row in rollouts(trainer).itertuples():
        asked = (row.completion_ids[~row.completion_mask] == TOOL_WORDS[0]).sum()
        about = len(row.prompt.removeprefix("<unk> ").removesuffix(" w7 <eos>"))
        assert row.reward == pytest.approx(asked + about / 100)
    assert Library.made == 1 + 3 * 8  # TRL's own, for evaluations, and one lane for each batch in flight
    assert trainer.environment_factories and trainer.environments is None  # as TRL had them


def test_a_failing_tool_is_an_answer(run: Any) -> None:
    trainer, _ = run(1, tools=[closed])

    assert all(row["tools/failure_frequency"] == 1.0 for row in records(trainer))
    assert lags(trainer) == [[min(step, 1)] for step in range(STEPS)]


def test_a_reply_that_cannot_be_used_leaves_its_own_batch(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bad_later_turns(monkeypatch)
    trainer, _ = run(FINISH, on_bad_rollout="drop")

    assert max(row.get("offpolicy/rollout/unusable_fraction", 0.0) for row in records(trainer)) > 0
    frame = rollouts(trainer)
    dropped = ~frame.completion_mask.map(any)
    assert 0 < dropped.sum() < len(frame) and frame.reward[dropped].isna().all()


def test_a_failed_request_stops_the_run(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_later_turns(monkeypatch)
    with pytest.raises(RuntimeError, match="A rollout could not be sampled: OSError: the network is gone"):
        run(1)


def test_after_a_resume_nothing_is_skipped_or_learned_from_twice(run: Any) -> None:
    whole = groups(run(FINISH, folder="whole")[0])
    run(FINISH, folder="parts", max_steps=2, save_strategy="steps", save_steps=2)
    trainer, server = run(FINISH, folder="parts", resume=True)

    assert groups(trainer) == whole
    assert lags(trainer) == [[0], [1], [0], [1], [2]]
    assert all(version >= 2 for _, version in server.asked)


def test_an_evaluation_samples_its_turns_by_trls_loop(run: Any) -> None:
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    trainer, _ = run(FINISH, environment_factory=Library, **evaluation)

    assert lags(trainer) == [[min(step, 2)] for step in range(STEPS)]
    evaluated = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert len(evaluated) == 3 and all("eval_tools/call_frequency" in row for row in evaluated)
