"""Routing replay through the TRL trainer: what is recorded, what is replayed, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import score_last_word, tiny_prompts
from torch import Tensor
from trainer_runs import Engine, records, scoring_calls

from trl_offpolicy.engines.routing import record
from trl_offpolicy.engines.routing.reported import EngineRoutes, RouteStore
from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.routing import KEY, predicting
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

pytestmark = pytest.mark.integration

TWO_STEPS = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "offpolicy": "paper/tis"}
LARGE = {"learning_rate": 3.0, "optim": "sgd", "lr_scheduler_type": "constant"}
AGREEMENT, FLIPS = "offpolicy/routing/agreement", "offpolicy/routing/flip_fraction"


@pytest.fixture
def build_moe(make_args: Callable[..., Any], fresh_model: Callable[..., Any], tokenizer: Any) -> Callable[..., Any]:
    def trainer(engine: Any = None, *, kind: str = "qwen3_moe", **options: Any) -> Any:
        return OffPolicyGRPOTrainer(
            fresh_model(kind), score_last_word, make_args(**options), train_dataset=tiny_prompts(),
            eval_dataset=tiny_prompts(4), processing_class=tokenizer, rollout_func=engine or Engine(noise=0.1),
        )  # fmt: skip

    return trainer


def watched(trainer: Any) -> list[tuple[dict[str, Any], Tensor]]:
    """(micro-batch, experts that its loss forward really used), one for each call of the loss."""
    seen: list[tuple[dict[str, Any], Tensor]] = []
    original = trainer._compute_loss

    def compute_loss(model: Any, inputs: dict[str, Any]) -> Tensor:
        with record(model) as recorded:
            loss: Tensor = original(model, inputs)
        seen.append((inputs, recorded.routed_experts))
        return loss

    trainer._compute_loss = compute_loss
    return seen


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def test_r2_replays_the_routing_of_the_old_pass(build_moe: Callable[..., Any]) -> None:
    """Rows travel through shuffle and split; at the old weights the router agrees, after a large step it would not."""
    trainer = build_moe(**TWO_STEPS, routing_replay="r2", **LARGE, max_steps=4)
    seen = watched(trainer)
    trainer.train()
    assert len(seen) == 4
    for inputs, used in seen:
        assert inputs[KEY].dtype == torch.int8 and torch.equal(used, inputs[KEY])
    rows = records(trainer)
    assert [row[AGREEMENT] == 1 and row[FLIPS] == 0 for row in rows] == [True, False, True, False]
    assert all(0 < row[FLIPS] < 1 for row in rows[1::2])
    assert [row["offpolicy/staleness/logp_diff_max"] < 1e-6 for row in rows] == [True, False, True, False]


def test_r2_costs_no_forward_and_steps_without_replay_stay_as_they_were(
    build_moe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first step of a generation routing is that of the old pass: same loss with and without R2."""
    runs = {}
    calls = scoring_calls(monkeypatch)
    for mode in ("none", "r2"):
        trainer = build_moe(**TWO_STEPS, routing_replay=mode, trim_padding=False, **LARGE)
        trainer.train()
        runs[mode] = (calls.copy(), records(trainer))
        calls.clear()
    assert runs["none"][0] == runs["r2"][0] == [8, 4, 4]
    first, second = (runs[mode][1] for mode in ("none", "r2"))
    assert first[0]["loss"] == second[0]["loss"] and first[0]["grad_norm"] == second[0]["grad_norm"]
    assert first[1]["grad_norm"] != second[1]["grad_norm"], "the second step replays"
    assert FLIPS not in first[0]


def test_r2_under_gradient_checkpointing(build_moe: Callable[..., Any]) -> None:
    options = {**TWO_STEPS, "routing_replay": {"mode": "r2", "device": "cpu"}, **LARGE}
    found = []
    for checkpointing in (False, True):
        trainer = build_moe(**options, gradient_checkpointing=checkpointing)
        trainer.train()
        found.append((weights(trainer), [row[FLIPS] for row in records(trainer)]))
    (plain, flips), (checkpointed, flips_too) = found
    assert flips == flips_too and flips[1] > 0
    for name, value in plain.items():
        torch.testing.assert_close(checkpointed[name], value, atol=1e-6, rtol=1e-5, msg=name)


class RoutedEngine(Engine):
    """A sampler whose routing is not the trainer's: every expert is the next one."""

    def __init__(self) -> None:
        super().__init__(noise=0.1)
        self.routes = RouteStore()

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        answer = super().__call__(prompts, trainer)
        for prompt, completion in zip(answer["prompt_ids"], answer["completion_ids"], strict=True):
            fed = [*prompt, *completion][:-1]
            with record(trainer.model) as recorded, torch.no_grad():
                trainer.model(input_ids=torch.tensor([fed]))
            routes = (recorded.routed_experts[0].to(torch.int16) + 1) % 4
            self.routes.add(EngineRoutes(tuple(fed), routes))
        return answer


def test_a_turn_without_routes_is_an_error_that_names_it(
    build_moe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second token of each completion is a tool's text. The store has the request of the first turn alone."""

    class FirstTurn(RoutedEngine):
        def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
            answer = super().__call__(prompts, trainer)
            known, self.routes._known = self.routes._known, {}
            for prompt, ids in zip(answer["prompt_ids"], answer["completion_ids"], strict=True):
                record = known[(*prompt, *ids[:-1])]
                fed = len(prompt) + 1
                self.routes.add(EngineRoutes(record.ids[:fed], record.routes[:fed]))
            mask = [[int(place != 1) for place in range(len(ids))] for ids in answer["completion_ids"]]
            return {**answer, "env_mask": mask}

    monkeypatch.setattr("trl_offpolicy.trl.config.check_replay", lambda args: None)  # it wants vLLM
    engine = FirstTurn()
    trainer = build_moe(engine, routing_replay="r3", offpolicy="paper/tis")
    trainer._routing._store = engine.routes
    with pytest.raises(ValueError, match=r"^routed_experts must hold .* but got \d of \d tokens for turn 2 of"):
        trainer.train()


@pytest.mark.parametrize("aligned", [True, False])
def test_r3_replays_what_the_engine_reported(
    build_moe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, aligned: bool
) -> None:
    monkeypatch.setattr("trl_offpolicy.trl.config.check_replay", lambda args: None)  # it wants vLLM
    engine = RoutedEngine()
    steps = {"offpolicy": "paper/tis"} if aligned else TWO_STEPS
    trainer = build_moe(engine, routing_replay="r3", **steps)
    trainer._routing._store = engine.routes
    seen = watched(trainer)
    trainer.train()
    assert len(engine.routes) == 0, "records are not kept beyond their batch"
    for inputs, used in seen:
        routes = inputs[KEY]
        attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1).bool()
        known = (routes >= 0).all(-1).all(-1)
        assert torch.equal(known.sum(1), attended.sum(1) - 1), "all but the last token, which was never fed"
        assert not (known & ~attended).any() and known[predicting(inputs)].all()
        assert torch.equal(used[known], routes[known])
    assert ("old_per_token_logps" in seen[0][0]) is not aligned
    rows = records(trainer)
    assert rows[0][FLIPS] > 0.5
    if not aligned:
        assert rows[0]["offpolicy/staleness/logp_diff_max"] < 1e-5, "the old pass is replayed too"
    trainer.evaluate()
    assert not trainer._stats.get("eval") and trainer.state.log_history[-1][f"eval_{FLIPS}"] > 0.5


def test_predicting_positions() -> None:
    inputs = {
        "prompt_ids": torch.zeros(1, 3),
        "completion_mask": torch.tensor([[1, 1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1, 1]]),
    }
    assert predicting(inputs).int().tolist() == [[0, 0, 1, 0, 1, 0, 0]]


@pytest.mark.parametrize("option", ["freeze_router", "freeze_router_bias"])
def test_frozen_routers_do_not_move(build_moe: Callable[..., Any], option: str) -> None:
    if option == "freeze_router_bias":
        with pytest.raises(ValueError, match="must be False for routers without a bias"):
            build_moe(freeze_router_bias=True)
        return
    trainer = build_moe(offpolicy="paper/tis", freeze_router=True)
    before = weights(trainer)
    trainer.train()
    moved = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert moved and not any(".gate." in name for name in moved)
    assert len(moved) == len(before) - 2 - sum("lm_head" in name and name not in moved for name in before)


def test_what_cannot_work_is_refused(build_moe: Callable[..., Any], make_args: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="r2 needs steps_per_generation"):
        make_args(routing_replay="r2")
    with pytest.raises(ValueError, match="routing_replay r3 must have an engine that reports"):
        make_args(routing_replay="r3")
    ahead = {"use_vllm": True, "vllm_mode": "server", "async_rollouts": 1}
    with pytest.raises(ValueError, match=r"routing_replay must be none or r3 with async_rollouts: .* but got 'r2'"):
        make_args(**TWO_STEPS, routing_replay="r2", **ahead)
    make_args(routing_replay="r3", **ahead)
    make_args(engine={"return_routing": True}, **ahead)
    with pytest.raises(ValueError, match=r"routing_replay\.mode must be one of .*'r4'"):
        make_args(routing_replay="r4")
    with pytest.raises(ValueError, match=r"routing_replay\.limit must be one of"):
        make_args(routing_replay={"mode": "r2", "limit": 3})
    with pytest.raises(ValueError, match="must be a mixture of experts"):
        build_moe(kind="llama", **TWO_STEPS, routing_replay="r2")
    with pytest.raises(ValueError, match="freeze_router must be False for a model without routers"):
        build_moe(kind="llama", freeze_router=True)
    small = build_moe(**TWO_STEPS, routing_replay={"mode": "r2", "limit_gib": 1e-7})
    with pytest.raises(ValueError, match=r"routing_replay\.limit_gib must be at least"):
        small.train()


def test_the_option_reads_yaml(tmp_path: Any) -> None:
    from trl import TrlParser

    path = tmp_path / "config.yaml"
    lines = ("use_cpu: true", "bf16: false", "steps_per_generation: 2", "routing_replay: {mode: r2, device: cpu}")
    path.write_text("\n".join((f"output_dir: {tmp_path}", *lines)))
    (args,) = TrlParser(OffPolicyGRPOConfig).parse_args_and_config(["--config", str(path)])
    assert args.routing_replay == {"mode": "r2", "device": "cpu"}
