"""Replies that cannot be used, in the TRL trainer: the run ends with the reason, or the step goes on without them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import EOS
from trainer_runs import Engine, generation_batches, records, rollouts
from trl.generation.vllm_generation import VLLMGeneration

from trl_offpolicy.engines.routing.reported import EngineRoutes, RouteStore, placed_routes
from trl_offpolicy.rollouts.screening import RolloutError, Screen, Unusable
from trl_offpolicy.trl.engine import TRLEngine

BAD = 2
"""The row of the second generation batch that cannot be used: the third of its group of four."""
BROKEN: dict[str, tuple[list[int], list[float], str]] = {
    "empty": ([], [], "it is empty"),
    "vocabulary": ([5, 4000], [-1.0, -1.0], "its token 1 is 4000, outside the vocabulary of 128 ids"),
    "positive": ([5, 6], [-1.0, 3.0], "the log-prob of its token 1 is \\+3, above 0"),
}


class Broken(Engine):
    """An engine that gives one reply that cannot be used, in its second call."""

    def __init__(self, ids: list[int], logps: list[float]) -> None:
        super().__init__(noise=0.3)
        self.reply, self.calls = (ids, logps), 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        self.calls += 1
        if self.calls == 2:
            output["completion_ids"][BAD], output["logprobs"][BAD] = self.reply
        return output


class Silent(Engine):
    """An engine without log-probs."""

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        return {**output, "logprobs": [[math.nan] * len(row) for row in output["logprobs"]]}


class Fewer(Engine):
    """An engine that gives fewer completions than were asked for."""

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {name: values[:-1] for name, values in super().__call__(prompts, trainer).items()}


@pytest.mark.integration
@pytest.mark.parametrize("name", BROKEN)
def test_the_run_ends_with_the_request_and_the_reason(build: Callable[..., Any], name: str) -> None:
    ids, logps, reason = BROKEN[name]
    trainer = build(Broken(ids, logps), offpolicy="paper/tis")
    with pytest.raises(RolloutError, match=f"1 of 8 replies.*row {BAD}: the reply to 'w.*' cannot be used: {reason}"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert (Path(trainer.args.output_dir) / "checkpoint-1").is_dir()  # finished work is kept, and the error says so


@pytest.mark.integration
def test_a_dropped_reply_leaves_the_step_and_its_baseline(build: Callable[..., Any]) -> None:
    """What it held makes no difference, and its group is judged without it."""
    weights, dropped = [], []
    for name in BROKEN:
        ids, logps, _ = BROKEN[name]
        trainer = build(Broken(ids, logps), offpolicy="paper/tis", on_bad_rollout="drop")
        batches = generation_batches(trainer)
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        dropped.append(batches[1])
        rows = records(trainer)
        assert [row.get("offpolicy/rollout/unusable_fraction") for row in rows] == [None, 1 / 8]
    assert all(torch.equal(one, weights[0]) for one in weights)

    batch = dropped[0]
    assert not batch["completion_mask"][BAD].any() and batch["completion_mask"].any(-1).sum() == 7
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    rewards, others = batch["rewards"], [0, 1, 3]
    assert rewards.isnan().tolist() == [row == BAD for row in range(8)]
    expected = (rewards[others] - rewards[others].mean()) / (rewards[others].std() + 1e-4)
    torch.testing.assert_close(batch["advantages"][others], expected, rtol=1e-4, atol=1e-5)
    assert batch["advantages"][BAD] == 0.0
    frame = rollouts(trainer)
    assert (frame[frame.step == 1].completion_ids.map(len) == 0).sum() == 1 and len(frame) == 16


@pytest.mark.integration
@pytest.mark.parametrize("advantages", ["rloo", "dr_grpo", "gdpo"])
def test_the_kits_own_estimators_leave_it_out(build: Callable[..., Any], advantages: str) -> None:
    trainer = build(Broken([], []), offpolicy={"preset": "paper/tis", "advantages": advantages}, on_bad_rollout="drop")
    batches = generation_batches(trainer)
    trainer.train()
    values = batches[1]["advantages"]
    assert values.isfinite().all() and values[BAD].abs().sum() == 0.0 and values[:4].abs().sum() > 0


@pytest.mark.integration
@pytest.mark.parametrize("mode", ["raise", "drop"])
def test_no_log_prob_ends_the_run_before_a_step(build: Callable[..., Any], mode: str) -> None:
    """They were trained on at weight 1, for as long as the run lasted."""
    trainer = build(Silent(), offpolicy="measure", on_bad_rollout=mode)
    with pytest.raises(RolloutError, match=r"gave none that is finite in a whole generation batch"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.integration
def test_fewer_completions_than_asked_for(build: Callable[..., Any]) -> None:
    with pytest.raises(RolloutError, match=r"rollout_func must return 8 entries, one per prompt, but got prompt_ids 7"):
        build(Fewer(), on_bad_rollout="drop").train()


# ------------------------------------------------------------------------------------------------------ vLLM's replies

GOOD = [5, 6, EOS]


def engine(monkeypatch: pytest.MonkeyPatch, answers: list[Any], mode: str) -> Any:
    """A colocated engine without vLLM, whose answers are given: one list of (ids, log-probs) per request."""
    made = TRLEngine.__new__(TRLEngine)
    made.mode, made.tensor_parallel_size, made._on_server, made.calls = "colocate", 1, False, []
    made.asked, made._step = [], lambda: 0
    made.model = SimpleNamespace(training=True)
    made.screen = Screen(mode, vocabulary=128, filler=EOS)

    def generate(self: Any, prompts: Any, images: Any, n: int, profiler: Any = None) -> Any:
        self.asked.append(prompts)
        rows = answers.pop(0)
        ids, logps = [list(one) for one, _ in rows], [[[value] for value in row] for _, row in rows]
        return prompts, ids, logps, [[[token] for token in row] for row in ids]

    monkeypatch.setattr(VLLMGeneration, "generate", generate)
    return made


def reply(ids: list[int], value: float = -1.0) -> tuple[list[int], list[float]]:
    return ids, [value] * len(ids)


def test_vllm_is_asked_again_for_the_bad_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first = [reply(GOOD), reply([]), reply(GOOD, 2.0)]
    made = engine(monkeypatch, [first, [reply([7, EOS]), reply([])], [reply([8, EOS])]], "retry")
    _, ids, logps, tokens = made.generate([[3], [4], [5]], None, 1)
    assert made.asked == [[[3], [4], [5]], [[4], [5]], [[5]]]
    assert ids == [GOOD, [7, EOS], [8, EOS]]
    assert tokens == [[[token] for token in row] for row in ids]
    assert logps == [[[-1.0]] * len(row) for row in ids]
    assert [call.completion for call in made.calls] == ids  # the check of ids sees what is trained on


def test_what_stays_bad_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(monkeypatch, [[reply(GOOD), reply([500])]], "drop")
    _, ids, logps, tokens = made.generate([[3], [4]], None, 1)
    assert ids[1] == [EOS] and tokens[1] == [[EOS]]
    assert isinstance(logps[1][0][0], Unusable) and np.isnan(logps[1][0][0])
    assert made.screen.agree(ids, [[value[0] for value in row] for row in logps]).here == (1,)


def test_the_filler_of_a_reply_has_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the rank that met the reply would miss its routing, alone."""
    made = engine(monkeypatch, [[reply(GOOD), reply([]), reply([])]], "drop")
    made.routes = RouteStore()
    made.routes.add(EngineRoutes((3, *GOOD[:-1]), torch.arange(12, dtype=torch.uint8).view(3, 2, 2)))
    prompts, ids, *_ = made.generate([[3], [4, 9], [3]], None, 1)
    found = [made.routes.find([*prompt, *row]) for prompt, row in zip(prompts, ids, strict=True)]
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])
    placed = placed_routes(found, mask, numbers=(0, 1), dtype=torch.int8)
    assert placed[:, :, 0, 0].tolist() == [[0, 4, 8, -1], [-1] * 4, [0, -1, -1, -1]]
    assert made.routes.find([4, 9]) is not None  # without the filler's token, which is masked
