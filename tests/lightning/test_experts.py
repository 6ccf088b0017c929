"""A mixture of experts in Lightning: what is recorded and replayed, what a checkpoint keeps, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning_runs import OwnMismatch, Watch, data, module, trainer
from tiny_models import tiny_model
from torch import Tensor

from lightning_module.experts import Experts, aux_loss_coef
from trl_offpolicy.engines.engine import Rollouts
from trl_offpolicy.engines.routing import record
from trl_offpolicy.rollouts.routing import KEY

AGREEMENT, FLIPS = "offpolicy/routing/agreement", "offpolicy/routing/flip_fraction"
TWO = {"steps_per_generation": 2, "num_iterations": 2}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def moe(engine: Any = "transformers", **options: Any) -> Any:
    return module(engine, **{"model": tiny_model("qwen3_moe"), "optimizer": sgd, **options})


class Routed(OwnMismatch):
    """It routes every token to the experts next to the trainer's, and reports it."""

    def generate(self, *args: Any, **kwargs: Any) -> Rollouts:
        rollouts = super().generate(*args, **kwargs)
        pairs = zip(rollouts.prompt_ids, rollouts.completion_ids, strict=True)
        routes = [self._route([*prompt, *completion][:-1]) for prompt, completion in pairs]
        return Rollouts(**{**vars(rollouts), "routed_experts": routes})

    @torch.no_grad()
    def _route(self, ids: list[int]) -> Tensor:
        with record(self.source.model) as recorded:
            self.source.model(input_ids=torch.tensor([ids]))
        return (recorded.routed_experts[0].to(torch.int16) + 1) % 4


class TwoTurns(Routed):
    """Its second token is a tool's text, and it reports the routing of the first turn alone."""

    def generate(self, *args: Any, **kwargs: Any) -> Rollouts:
        rollouts = super().generate(*args, **kwargs)
        assert rollouts.routed_experts is not None
        fed = [len(prompt) + 1 for prompt in rollouts.prompt_ids]
        cut = {
            "tool_mask": [[int(place != 1) for place in range(len(ids))] for ids in rollouts.completion_ids],
            "routed_experts": [routes[:many] for routes, many in zip(rollouts.routed_experts, fed, strict=True)],
        }
        return Rollouts(**{**vars(rollouts), **cut})


@pytest.mark.integration
def test_a_turn_without_routes_is_an_error_that_names_it(tmp_path: Path) -> None:
    ours = moe(TwoTurns(noise=0.1), correction="paper/tis", routing_replay="r3")
    with pytest.raises(ValueError, match=r"^routed_experts must hold .* but got \d of \d tokens for turn 2 of"):
        trainer(tmp_path, max_steps=1).fit(ours, data())


class Used(pl.Callback):
    """The experts that the loss forward of every micro-batch really used, beside its record."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        original = pl_module.scorer

        def scorer(policy: Any, rows: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(policy, rows, **options)
            with record(policy) as recorded:
                scores = original(policy, rows, **options)
            self.seen.append((recorded.routed_experts, rows[KEY]))
            return scores

        scorer.support_stats = original.support_stats  # type: ignore[attr-defined]
        pl_module.scorer = scorer


@pytest.mark.integration
@pytest.mark.parametrize("checkpointing", [False, True])
def test_r2_replays_the_routing_of_the_old_pass(tmp_path: Path, checkpointing: bool) -> None:
    """At the weights that sampled the router agrees; after a large step it would not, and is replayed."""
    watch, used = Watch(), Used()
    ours = moe(routing_replay="r2", gradient_checkpointing=checkpointing)
    trainer(tmp_path, callbacks=[watch, used], max_steps=4).fit(ours, data(**TWO))
    assert len(used.seen) == 4 and all(torch.equal(*pair) for pair in used.seen)
    assert watch.logs[0][AGREEMENT] == 1 and watch.logs[0]["offpolicy/staleness/logp_diff_max"] < 1e-5
    assert all(0 < row[FLIPS] < 1 for row in watch.logs[1:])


@pytest.mark.integration
def test_r3_replays_what_the_engine_reported_in_every_pass(tmp_path: Path) -> None:
    """Old log-probs, loss and the noise floor; the reference model routes freely."""
    watch, used = Watch(), Used()
    ours = moe(Routed(noise=0.1), routing_replay="r3", noise_floor_steps=1, correction="paper/tis",
               objective={"kl": {"coef": 0.01}})  # fmt: skip
    references: list[Tensor] = []
    original = ours.generation._score_reference

    def score(rows: Any, size: int) -> Tensor:
        references.extend([original(rows, size), original({k: v for k, v in rows.items() if k != KEY}, size)])
        return references[0]

    ours.generation._score_reference = score
    trainer(tmp_path, callbacks=[watch, used], max_steps=2).fit(ours, data(steps_per_generation=2))
    for taken, routes in used.seen:
        known = (routes >= 0).all(-1).all(-1)
        assert 0.3 < known.float().mean() < 1 and torch.equal(taken[known], routes[known])
    first = watch.logs[0]
    assert first[FLIPS] > 0.5 and first["offpolicy/staleness/logp_diff_max"] < 1e-4
    assert max(row["offpolicy/noise_floor/logp_diff_max"] for row in watch.logs) < 1e-3
    assert torch.equal(*references[:2])


@pytest.mark.integration
def test_r2_with_an_engine_that_reports_replays_the_trainers_routing(tmp_path: Path) -> None:
    watch, used = Watch(), Used()
    ours = moe(Routed(noise=0.1), routing_replay="r2", correction="paper/tis")
    trainer(tmp_path, callbacks=[watch, used], max_steps=2).fit(ours, data(steps_per_generation=2))
    assert watch.logs[0][AGREEMENT] == 1 and all(torch.equal(*pair) for pair in used.seen)


@pytest.mark.integration
def test_a_resumed_run_replays_the_routing_of_its_rollouts(tmp_path: Path) -> None:
    """It stops inside a generation, whose rows were sampled, and recorded, before the checkpoint."""

    def fit(steps: int, resume: Path | None = None) -> tuple[Watch, Used, Any]:
        pl.seed_everything(1, verbose=False)
        watch, used = Watch(), Used()
        ours = moe(routing_replay={"mode": "r2", "device": "cpu"})
        owner = trainer(tmp_path, callbacks=[watch, used], max_steps=steps)
        owner.fit(ours, data(**TWO), ckpt_path=resume, weights_only=True if resume else None)
        return watch, used, owner

    whole, recorded, _ = fit(4)
    _, _, owner = fit(2)
    owner.save_checkpoint(tmp_path / "two.ckpt")
    rest, replayed, _ = fit(4, tmp_path / "two.ckpt")
    for (_, before), (taken, after) in zip(recorded.seen[2:], replayed.seen, strict=True):
        assert after.dtype == torch.int8 and torch.equal(before, after) and torch.equal(taken, after)
    assert rest.logs[0][FLIPS] == whole.logs[2][FLIPS] > 0
    for name, value in whole.weights[-1].items():
        assert torch.equal(value, rest.weights[-1][name]), name


@pytest.mark.integration
def test_frozen_routers_do_not_move(tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in tiny_model("qwen3_moe").named_parameters()}
    ours = moe(freeze_router=True)
    trainer(tmp_path, max_steps=1).fit(ours, data())
    moved = {name for name, value in ours.policy.named_parameters() if not torch.equal(value, before[name])}
    assert len(moved) > 5 and not any(".gate." in name for name in moved)


@pytest.mark.integration
def test_what_only_a_run_can_refuse(tmp_path: Path) -> None:
    def fit(ours: Any, **sizes: Any) -> None:
        trainer(tmp_path, max_steps=1).fit(ours, data(**sizes))

    early = moe(routing_replay="r2")
    with pytest.raises(ValueError, match=r"num_iterations above accumulate_grad_batches"):
        fit(early)
    assert early.policy is None and early.generation.engine is None  # nothing is loaded for that
    with pytest.raises(ValueError, match=r"routing_replay\.limit_gib must be at least"):
        fit(moe(routing_replay={"mode": "r2", "limit_gib": 1e-7}), **TWO)
    with pytest.raises(ValueError, match=r"routing_replay\.limit_gib must be at least"):
        fit(moe(Routed(), routing_replay={"mode": "r3", "limit_gib": 1e-7}))
    with pytest.raises(ValueError, match=r"r3 must have the routing of every completion, but .* is None"):
        fit(moe(OwnMismatch(), routing_replay="r3"))


def test_settings_that_cannot_work_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match=r"r3 must have an engine that reports its routing: engine vllm or server"):
        moe(routing_replay="r3")
    with pytest.raises(ValueError, match=r"routing_replay\.mode must be one of .*'r4'"):
        moe(routing_replay="r4")
    with pytest.raises(ValueError, match="must be none or r3 with async_rollouts: r2 records"):
        Experts({**moe().settings, "async_rollouts": 1, "routing_replay": "r2"})
    with pytest.raises(ValueError, match="freeze_router must be True or False, but got 'yes'"):
        moe(freeze_router="yes")
    with pytest.raises(ValueError, match="router_aux_loss_coef must be a finite number, but got nan"):
        moe(router_aux_loss_coef=float("nan"))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("llama", {"routing_replay": "r2"}, "must be a mixture of experts"),
        ("llama", {"freeze_router": True}, "freeze_router must be False for a model without routers"),
        (
            "llama",
            {"router_aux_loss_coef": 0.1},
            r"router_aux_loss_coef must be None or 0 .* 0\.1 for LlamaFor",
        ),
        ("qwen3_moe", {"freeze_router_bias": True}, "must be False for routers without a bias"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe(model=tiny_model(kind), **options).configure_model()


def test_the_coefficient_of_the_load_balancing_loss() -> None:
    """As in TRL: that of the architecture unless one is given, and none for a dense model."""
    mixture, dense = tiny_model("qwen3_moe"), tiny_model()
    found = [aux_loss_coef(mixture, given) for given in (None, 0.0, 0.5)]
    assert found == [mixture.config.router_aux_loss_coef, 0.0, 0.5] and found[0] > 0
    assert aux_loss_coef(dense, None) == aux_loss_coef(dense, 0.0) == 0.0


@pytest.mark.parametrize("engine", ["vllm", "server", {"type": "vllm", "seed": 3}])
def test_r3_asks_the_engine_for_its_routing(engine: Any) -> None:
    given = {"type": engine} if isinstance(engine, str) else engine
    assert moe(engine, routing_replay="r3").experts.engine == {**given, "return_routing": True}
    assert moe(engine).experts.engine == engine
