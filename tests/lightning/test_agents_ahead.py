"""Agents that are sampled ahead under Lightning: whole episodes in flight, and the same numbers as in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from agent_runs import TOOL_WORDS, Library, closed, conversations, count_letters, first_prompts, lookup, tool_tokenizer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_runs import Watch, data, module, trainer
from rollouts.ahead.fake_server import FakeServer, bad_later_turns, fail_later_turns, lags_by_step, server_class
from tiny_models import WORDS
from trainer_runs import TIMES

from lightning_module import RunFolder, engines

pytestmark = pytest.mark.integration

STEPS, LENGTH = 5, 24
SERVER = {"type": "server", "base_url": "http://127.0.0.1:1"}
FINISH = {"lag": 2, "partial": "finish"}
CUT = {"free": first_prompts(), "before_cut": 3}
WAIT, CROSSING = "offpolicy/rollout/wait_seconds", "offpolicy/rollout/cross_version_fraction"


class Run:
    """What a run left behind."""

    def __init__(self, watch: Watch, server: FakeServer, folder: Path, owner: Any) -> None:
        self.watch, self.server, self.logs, self.owner = watch, server, watch.logs, owner
        self.rollouts = pd.read_parquet(folder / "rollouts.parquet")

    @property
    def lags(self) -> list[list[int]]:
        """By optimizer step: the lags of the rows' tokens, without repetition."""
        return lags_by_step(self.rollouts)

    @property
    def prompts(self) -> list[list[str]]:
        """The prompts of every generation batch that was learned from, row by row."""
        return [list(part.prompt) for _, part in self.rollouts.groupby("step")]


@pytest.fixture
def run(fresh_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Run]:
    """``run(async_rollouts, server=..., flags=..., **module_options)``: two groups of four in each of five steps."""

    def train(
        ahead: Any,
        *,
        server: dict[str, Any] | None = None,
        flags: dict[str, Any] | None = None,
        sizes: dict[str, Any] | None = None,
        folder: str = "run",
        resume: Path | None = None,
        **options: Any,
    ) -> Run:
        made: list[FakeServer] = []
        monkeypatch.setattr(engines, "ServerEngine", server_class(fresh_model(), made, **(server or {})))
        watch, place = Watch(), tmp_path / folder
        callbacks = [watch, RunFolder(str(place), report=False), *(flags or {}).pop("callbacks", [])]
        given = {
            "correction": "paper/tis", "optimizer": partial(torch.optim.SGD, lr=0.02), "control": "off",
            "tokenizer": tool_tokenizer(), "sampling": {"max_tokens": LENGTH}, "reward_funcs": count_letters,
            "max_tool_calling_iterations": 2, "check_token_ids": "raise", **options,
        }  # fmt: skip
        given |= {} if {"tools", "environment_factory"} & set(options) else {"tools": [lookup]}
        ours = module(SERVER, async_rollouts=ahead, **given)
        owner = trainer(place, callbacks=callbacks, **{"max_steps": STEPS, **(flags or {})})
        rows = data(conversations(16), micro_batch_size=8, **(sizes or {}))
        owner.fit(ours, rows, ckpt_path=resume, weights_only=True if resume else None)
        return Run(watch, made[0], place, owner)

    return train


def assert_tools_are_masked(seen: Run) -> None:
    """The tool's words are in the rows that call it, and nothing learns from them."""
    called = 0
    for row in seen.rollouts.itertuples():
        tool = ~row.completion_mask
        assert not row.weights[tool].any()
        called += tool.any()
        assert all(word in row.completion_ids[tool] for word in TOOL_WORDS) == tool.any()
    assert 0.2 * len(seen.rollouts) < called < len(seen.rollouts)


@pytest.mark.parametrize("options", [{}, {"environment_factory": Library, "reward_funcs": None}])
def test_without_lag_it_is_the_run_in_turn(run: Any, options: dict[str, Any]) -> None:
    in_turn, ahead = (run(lag, folder=str(lag), **options) for lag in (None, 0))

    for ours, theirs in zip(ahead.logs, in_turn.logs, strict=True):
        expected = {key: value for key, value in theirs.items() if key not in TIMES}
        assert {key: value for key, value in ours.items() if key not in {*TIMES, WAIT, CROSSING}} == pytest.approx(
            expected
        )
        assert ours["tools/call_frequency"] > 0 and WAIT in ours
    for name, value in in_turn.watch.weights[-1].items():
        assert torch.equal(ahead.watch.weights[-1][name], value), name
    assert ahead.lags == [[0]] * STEPS
    assert_tools_are_masked(ahead)


@pytest.mark.parametrize("lag", [1, 2])
def test_episodes_are_sampled_lag_generations_before(run: Any, lag: int) -> None:
    """Scored with the weights of each token's version, the trainer agrees with the engine to the last digit."""
    in_turn = run(0, folder="turn")
    seen = run({"lag": lag, "partial": "finish", "old_logps": "snapshot"})

    assert seen.prompts == in_turn.prompts
    assert seen.lags == [[min(step, lag)] for step in range(STEPS)]
    assert len(seen.server.asked) == STEPS * 2  # nothing for after the end
    for step, row in enumerate(seen.logs):
        assert row["offpolicy/mismatch/logp_diff_max"] < 2e-5
        assert (row["offpolicy/staleness/kl_k3"] > 1e-6) == (step > 0)
        assert row["offpolicy/rollout/retokenised_fraction"] == 0.0
        assert row[CROSSING] == 0.0
        assert row["tools/call_frequency"] > 0 and row["tools/failure_frequency"] == 0
    assert_tools_are_masked(seen)


def test_a_turn_that_is_cut_goes_on_under_the_new_weights(run: Any) -> None:
    seen = run({"lag": 2, "partial": "continue", "old_logps": "snapshot"}, server=CUT)

    assert max(map(max, seen.lags)) == 2
    for step, row in enumerate(seen.logs):
        assert row["offpolicy/mismatch/logp_diff_max"] < 2e-5
        assert row[CROSSING] == float(step > 0)
    for row in seen.rollouts.itertuples():
        assert (row.policy_versions[1:] >= row.policy_versions[:-1]).all()
    assert_tools_are_masked(seen)


def test_each_batch_in_flight_has_its_own_environments(run: Any) -> None:
    """A reward is that of its row, also where another batch was begun in between."""
    Library.made = 0
    seen = run(FINISH, environment_factory=Library, reward_funcs=None)

    assert seen.lags == [[min(step, 2)] for step in range(STEPS)]
    for row in seen.rollouts.itertuples():
        asked = (row.completion_ids[~row.completion_mask] == TOOL_WORDS[0]).sum()
        about = len(row.prompt.removeprefix("<unk> ").removesuffix(" w7 <eos>"))
        assert row.reward == pytest.approx(asked + about / 100), (row.prompt, row.completion_ids)
    assert Library.made == 3 * 8  # one lane for each batch in flight, built once
    assert_tools_are_masked(seen)


def test_tools_run_while_the_module_learns(run: Any) -> None:
    """The second batch calls tools before the first optimizer step is over."""
    learning, called = threading.Event(), threading.Event()

    def watched(word: str) -> str:
        """Look a word up.

        Args:
            word: The word.

        Returns:
            Three words.
        """
        if learning.is_set():
            called.set()
        return lookup(word)

    watched.__name__ = "lookup"

    class Waits(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().step(*args, **kwargs)  # the closure samples the first batch
            learning.set()
            assert called.wait(20), "no tool was called before the next sync"
            return loss

    seen = run(
        1, tools=[watched], server={"free": first_prompts(), "until": learning}, optimizer=partial(Waits, lr=0.02)
    )
    assert seen.lags == [[min(step, 1)] for step in range(STEPS)]


def test_a_failing_tool_is_an_answer(run: Any) -> None:
    seen = run(1, tools=[closed])

    assert all(row["tools/failure_frequency"] == 1.0 for row in seen.logs)
    assert seen.lags == [[min(step, 1)] for step in range(STEPS)]


def test_a_reply_that_cannot_be_used_leaves_its_own_batch(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bad_later_turns(monkeypatch)
    seen = run(FINISH, on_bad_rollout="drop")

    assert max(row.get("offpolicy/rollout/unusable_fraction", 0.0) for row in seen.logs) > 0
    dropped = ~seen.rollouts.completion_mask.map(any)
    assert 0 < dropped.sum() < len(seen.rollouts) and seen.rollouts.reward[dropped].isna().all()
    with pytest.raises(RuntimeError, match=r"cannot be used: its token 0 is 1000000, outside the vocabulary"):
        run(1)


class Closed(Library):
    """A library that has a day off."""

    def reset(self, prompt: Any, **row: Any) -> str:
        if prompt[-1]["content"] == WORDS[6]:
            raise OSError("closed today")
        return super().reset(prompt, **row)


def test_an_environment_that_cannot_be_reset_leaves_its_own_batch(run: Any) -> None:
    seen = run(FINISH, environment_factory=Closed, reward_funcs=None, on_bad_rollout="drop")

    dropped = ~seen.rollouts.completion_mask.map(any)
    assert dropped.any() and dropped.tolist() == [row == f"<unk> {WORDS[6]} <eos>" for row in seen.rollouts.prompt]


def test_a_failed_request_stops_the_run(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_later_turns(monkeypatch)
    with pytest.raises(RuntimeError, match="A rollout could not be sampled: OSError: the network is gone"):
        run(1)


def test_a_resumed_run_asks_again_for_what_was_in_flight(run: Any, tmp_path: Path) -> None:
    whole = run(FINISH, folder="whole")
    saver = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    run(FINISH, folder="parts", flags={"callbacks": [saver], "enable_checkpointing": True, "max_steps": 2})
    resumed = run(FINISH, folder="parts", resume=tmp_path / "saved" / "step=2.ckpt")

    assert resumed.prompts == whole.prompts
    assert resumed.lags == [[0], [1], [0], [1], [2]]
    assert all(version >= 2 for _, version in resumed.server.asked)


def test_validation_samples_its_turns_in_between(run: Any) -> None:
    held_out = {"val_dataset": conversations(16)[12:], "val_batch_size": 4}
    seen = run(FINISH, sizes=held_out, flags={"val_check_interval": 2}, environment_factory=Library)

    assert seen.lags == [[min(step, 2)] for step in range(STEPS)]
    assert seen.owner.callback_metrics["eval_tools/call_frequency"] > 0


def test_what_an_early_end_of_the_epoch_leaves_in_flight_is_dropped(run: Any) -> None:
    seen = run(FINISH, flags={"limit_train_batches": 2, "max_steps": 4}, environment_factory=Library)

    assert seen.lags == [[0], [1], [0], [1]]
