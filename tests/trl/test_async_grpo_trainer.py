"""TRL's AsyncGRPOTrainer with this kit's objective, on a CPU: plain attention where TRL has a FlashAttention-3 kernel.

The rollouts come from a stub worker; everything between the queue and the weights is TRL's and this kit's own code.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model, tiny_prompts
from torch import Tensor

import trl_offpolicy as op

TEMPERATURE = 0.8


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *_: Any, softmax_scale: float, **__: Any
) -> Tensor:
    """What ``flash_attn_varlen_func`` computes with causal=True: segment by segment, aligned at the end."""
    parts = []
    for s in range(len(cu_q) - 1):
        q, k, v = query[cu_q[s] : cu_q[s + 1]], key[cu_k[s] : cu_k[s + 1]], value[cu_k[s] : cu_k[s + 1]]
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(parts)


@dataclass
class Sample:
    """TRL's ``RolloutSample``, with the version of each token where a worker knows it."""

    input_ids: np.ndarray
    completion_mask: np.ndarray
    old_log_probs: np.ndarray
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    prompt: Any = ()
    completion: Any = ()
    enqueued_at: float | None = None
    token_versions: np.ndarray | None = None


def samples(seed: int = 0, groups: int = 2, size: int = 2) -> list[Sample]:
    """Groups with a common prompt of 4 tokens; the second sample of each has two turns with a tool's output between."""
    rng, made = np.random.default_rng(seed), []
    for number in range(groups):
        prompt = rng.integers(3, 120, 4)
        for one in range(size):
            length = int(rng.integers(4, 8))
            mask = np.array([0] * 4 + [1] * length)
            if one % 2:
                mask[5:7] = 0
            ids = np.concatenate([prompt, rng.integers(3, 120, length)])
            logps = np.where(mask, -4.8 + 0.6 * rng.standard_normal(len(ids)), 0.0).astype(np.float32)
            metrics = {"reward": float(one), "reward_std": 0.5}
            made.append(Sample(ids, mask, logps, 1.0 - 1.5 * one, 0, number, metrics))
    return made


class Worker:
    """Gives the same samples for ever, with the version that is live."""

    def __init__(self, rows: list[Sample], *, behind: int = 0) -> None:
        self.rows, self.behind, self.version = rows, behind, 0
        self.rollout_buffer, self.metrics_queue = self, queue.Queue()
        self.given = 0

    def get(self, timeout: float) -> Sample:
        row = self.rows[self.given % len(self.rows)]
        self.given += 1
        return Sample(**{**row.__dict__, "model_version": self.version - self.behind})

    def qsize(self) -> int:
        return 1

    def update_model_version(self, version: int) -> None:
        self.version = version

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...


class NoTransfer:
    """Weights go nowhere; the parameters are walked through as for a real sync."""

    def send_weights(self, iterator: Iterator[Any]) -> None:
        for _ in iterator:
            pass

    def init_weight_transfer(self) -> None: ...

    pause = resume = destroy = init_weight_transfer


Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path, model_folder: Callable[[str], Path], tokenizer: Any, monkeypatch: Any) -> Make:
    """A trainer on the stub, the fixture attention under TRL's name for its kernel."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, packing

    from trl_offpolicy.trl.async_grpo import OffPolicyAsyncGRPOTrainer

    kernel = SimpleNamespace(flash_attn_varlen_func=plain_attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernel)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # asks for a CUDA device

    def build(
        worker: Worker, *, objective: Any = "paper/tis", cls: Any = OffPolicyAsyncGRPOTrainer, **options: Any
    ) -> Any:
        args = AsyncGRPOConfig(
            str(tmp_path / "run"), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, token_budget=0,
            per_device_train_batch_size=4, max_steps=2, temperature=TEMPERATURE, learning_rate=1e-2, save_strategy="no",
            gradient_checkpointing=False, max_grad_norm=0.0, **options,
        )  # fmt: skip
        extra = {} if cls is not OffPolicyAsyncGRPOTrainer else {"objective": objective}
        return cls(
            str(model_folder("llama")), args=args, train_dataset=tiny_prompts(), processing_class=tokenizer,
            rollout_worker=worker, weight_transfer=NoTransfer(), **extra,
        )  # fmt: skip

    return build


def micro_batch(trainer: Any, *, version: int = 0) -> dict[str, Tensor]:
    """The first micro-batch, the learner at ``version`` with no step since the sync."""
    trainer.model_version = trainer._synced_version = version
    trainer.rollout_worker.update_model_version(version)
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer._last_step_end_time = None
    return next(iter(trainer.get_train_dataloader()))


def padded_batch(model: Any, rows: list[Sample], versions: list[list[int]], current: int) -> op.PolicyBatch:
    """The same rows scored one by one, without packing: what the adapter must agree with."""
    length = max(len(row.input_ids) for row in rows) - 4
    shape = (len(rows), length)
    logps, mu, mask = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    by_token = torch.full(shape, current)
    for i, row in enumerate(rows):
        ids = torch.from_numpy(row.input_ids).unsqueeze(0)
        scores = (model(ids).logits[:, :-1] / TEMPERATURE).log_softmax(-1).gather(-1, ids[:, 1:, None])[0, 3:, 0]
        here = torch.arange(len(scores))
        logps = logps.index_put((torch.tensor(i), here), scores)
        mu[i, : len(scores)] = torch.from_numpy(row.old_log_probs[4:])
        mask[i, : len(scores)] = torch.from_numpy(row.completion_mask[4:]).bool()
        by_token[i, : len(scores)] = torch.tensor(versions[i][4:])
    return op.PolicyBatch(
        per_token_logps=logps,
        sampling_per_token_logps=mu,
        completion_mask=mask,
        advantages=torch.tensor([row.advantage for row in rows]),
        rewards=torch.tensor([row.metrics["reward"] for row in rows]),
        group_ids=torch.tensor([row.group_id for row in rows]),
        policy_versions=by_token,
        current_version=current,
    )


def objectives() -> dict[str, op.Objective]:
    from trl_offpolicy.objective.proximal import InterpolatedProximal

    weight = op.TruncateWeight(level="token", max_weight=1.2)
    geometric = op.Correction(keep=(op.RatioBand(level="sequence_mean", low=0.8, high=1.3),), measure=("total",))
    return {
        "decoupled": op.Objective(correction=op.Correction(weight=weight)),
        "sequence": op.Objective(correction=op.Correction(weight=op.TruncateWeight(level="sequence", max_weight=1.2))),
        "turn": op.Objective(correction=op.Correction(weight=op.TruncateWeight(level="turn", max_weight=1.2))),
        "bypass": op.Objective(mode="bypass", correction=geometric),
        "a3po": op.Objective(correction=op.Correction(weight=weight), proximal=InterpolatedProximal()),
        "dr_grpo": op.Objective(correction=op.Correction(weight=weight), aggregation="seq_mean_token_mean"),
    }


@pytest.mark.parametrize("name", ["decoupled", "sequence", "turn", "bypass", "a3po", "dr_grpo"])
def test_loss_and_gradient_are_the_objectives_on_the_same_rows(make: Make, name: str) -> None:
    rows, objective = samples(), objectives()[name]
    versions = [[3] * len(row.input_ids) for row in rows]
    versions[1][8:] = [5] * (len(versions[1]) - 8)  # sampled across a weight sync
    rows[1].token_versions = np.array(versions[1])
    worker = Worker(rows, behind=2)
    trainer = make(worker, objective=objective)
    inputs = micro_batch(trainer, version=5)
    assert inputs["input_ids"].numel() < sum(len(row.input_ids) for row in rows)  # shared prompts are packed once
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    mine = {key: value.grad for key, value in trainer.model.named_parameters()}

    plain = tiny_model()
    batch = padded_batch(plain, rows, versions, 5)
    expected = objective(batch)
    expected.loss.backward()
    torch.testing.assert_close(loss.detach(), expected.loss.detach(), atol=1e-5, rtol=1e-5)
    for key, value in plain.named_parameters():
        torch.testing.assert_close(mine[key], value.grad, atol=1e-5, rtol=1e-4)
    assert trainer._stats is not None
    theirs, ours = expected.stats.compute(), trainer._stats.compute()
    for key in ("total/kl_k3", "total/logp_diff_mean", "rollout/version_lag_mean", "rollout/version_lag_max"):
        assert ours[f"offpolicy/{key}"] == pytest.approx(theirs[f"offpolicy/{key}"], abs=1e-5)
    assert ours["offpolicy/rollout/version_lag_max"] == 2


def test_the_step_is_that_of_one_process_however_samples_are_dealt_out(make: Make) -> None:
    """TRL balances ranks by cost, not by samples: one has three of the four here. Two micro-batches are averaged."""
    from trl.experimental.async_grpo.packing import TreeRow

    from trl_offpolicy.functional.aggregation import AGGREGATIONS
    from trl_offpolicy.trl.async_grpo.data import VersionedCollator

    trainer = make(Worker(samples()))
    planned = next(iter(trainer.get_train_dataloader().dataset))
    everyone = [sample for row in planned for sample in row.samples]
    rows = [TreeRow(), TreeRow()]
    for place, sample in enumerate(everyone):
        rows[place == 3].add(sample)
    dealt = VersionedCollator(pad_token_id=0, num_processes=2).torch_call([rows])
    ranks = [{key: value[rank : rank + 1] for key, value in dealt.items()} for rank in (0, 1)]
    trained = sum(int(sample["completion_mask"].sum()) for sample in everyone)
    for aggregation in AGGREGATIONS:
        trainer.objective = op.Objective(aggregation=aggregation)
        given = [trainer._reduction(rank, 2) for rank in ranks]
        by_token = aggregation == "token_mean"
        assert [item.tokens for item in given] == ([2.0 * trained] * 2 if by_token else [None] * 2)
        assert [item.sequences for item in given] == ([None] * 2 if by_token else [8.0] * 2)


def test_in_bypass_mode_it_is_trls_own_loss(make: Make) -> None:
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    found = []
    for cls in (None, AsyncGRPOTrainer):
        options = {} if cls is None else {"cls": cls}
        bypass = op.Objective(mode="bypass", policy_loss=op.losses.PPOClip(low=0.1, high=0.3))
        options |= {"epsilon": 0.1, "epsilon_high": 0.3, "gradient_accumulation_steps": 2}
        trainer = make(Worker(samples()), objective=bypass, **options)
        trainer._synced_version = 0
        loss = trainer.compute_loss(trainer.model, micro_batch(trainer))
        loss.backward()
        found.append((loss.detach(), trainer.model.lm_head.weight.grad))
    torch.testing.assert_close(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
    assert found[0][0].abs() > 1e-3


@pytest.mark.integration
def test_it_trains_and_logs_both_kinds_of_metrics(make: Make) -> None:
    """Two steps of two micro-batches; every sync is a version, samples come one version behind."""
    trainer = make(Worker(samples(), behind=1), gradient_accumulation_steps=2, max_staleness=4)
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, trainer.model.lm_head.weight)
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == 2 and trainer.current_version == 3  # the cold sync and one a step
    for row in logged:
        assert np.isfinite(row["loss"]) and row["sample/staleness_mean"] >= 1.0
        assert row["offpolicy/rollout/version_lag_mean"] >= 1.0
        assert row["offpolicy/weight/truncated_fraction"] > 0.0
        assert {"ratio", "kl", "clip_ratio/region_mean", "batch/packing_ratio"} <= set(row)


def test_a_step_since_the_sync_counts_as_a_version(make: Make) -> None:
    trainer = make(Worker(samples()), weight_sync_steps=2)
    trainer._sync_weight()
    assert trainer.current_version == 1
    trainer.state.global_step = 1
    assert trainer.current_version == 2
    trainer._sync_weight()
    assert trainer.current_version == 2


def test_what_packing_cannot_give_is_refused(make: Make) -> None:
    from trl_offpolicy.objective.kl import KLPenalty
    from trl_offpolicy.objective.proximal import AveragedProximal

    for objective, message in (
        (
            op.Objective(correction=op.Correction(weight=op.TruncateWeight(max_weight=2.0), normalize="original")),
            "packs sample by sample",
        ),
        (op.Objective(kl=KLPenalty(coef=0.1)), "no reference policy"),
        (op.Objective(proximal=AveragedProximal(decay=0.5)), "must not be AveragedProximal"),
        (op.Objective(shaping=(op.shaping.DiscrepancyPenalty(),)), "but got DiscrepancyPenalty, which moves"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            make(Worker(samples()), objective=objective)
