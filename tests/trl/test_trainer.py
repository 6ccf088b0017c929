"""OffPolicyGRPOTrainer end to end on a tiny model: forward passes, records, resuming, refusals."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from tiny_models import score_last_word
from trainer_runs import GENERATIONS, Engine, records, rollouts, scoring_calls

from trl_offpolicy import PolicyBatch
from trl_offpolicy.control import CONTROL_METRICS
from trl_offpolicy.objective import objective as objectives
from trl_offpolicy.objective.measure import GRADIENT_METRICS
from trl_offpolicy.rollouts.clock import TIME_METRICS
from trl_offpolicy.rollouts.duplicates import DUPLICATE_METRICS
from trl_offpolicy.run_folder.writer import RolloutRecorder
from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

COLUMNS = {
    "step", "policy_version", "prompt", "completion", "reward", "advantage", "group_id", "completion_ids",
    "completion_mask", "sampling_per_token_logps", "old_per_token_logps", "entropies", "weights", "keep_mask",
    "policy_versions", "prompt_ids",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------ forward passes


@pytest.mark.parametrize(
    ("accumulation", "steps_per_generation", "expected"),
    [
        (2, 2, {4: 4}),  # aligned: two micro-batches in each of two steps, and nothing else
        (4, 2, {4: 8}),  # aligned: two generations a step
        (1, 2, {4: 4}),  # two steps on one generation batch: TRL's pass over it for the old log-probs, in two forwards
    ],
)
def test_forward_passes(
    build: Callable[..., OffPolicyGRPOTrainer],
    monkeypatch: pytest.MonkeyPatch,
    accumulation: int,
    steps_per_generation: int,
    expected: dict[int, int],
) -> None:
    """Log-probs are computed once per micro-batch; ``expected`` counts calls by their number of rows."""
    calls = scoring_calls(monkeypatch)
    trainer = build(
        Engine(noise=0.3),
        offpolicy="paper/tis",
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation,
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert Counter(calls) == expected


# ------------------------------------------------------------------------------------------------------------- metrics


def test_sampling_from_the_trainer_itself_leaves_no_mismatch_metrics(
    build: Callable[..., OffPolicyGRPOTrainer],
) -> None:
    """transformers' generate samples from the trainer's weights: no mismatch to measure, old is current."""
    trainer = build()
    trainer.train()
    for row in records(trainer):
        keys = {key for key in row if key.startswith("offpolicy/")}
        groups = {key.split("/")[1] for key in keys}
        assert groups == {"loss", "rollout", "gradient", "control", "lag", "time"}
        assert {key for key in keys if "/lag/" in key} == {"offpolicy/lag/0/clip_fraction"}
        assert row["entropy"] == row["offpolicy/loss/entropy"] > 0


@pytest.mark.parametrize("steps_per_generation", [2, 4], ids=["aligned", "old_log_probs"])
def test_every_diagnostic_reaches_metrics_jsonl(
    build: Callable[..., OffPolicyGRPOTrainer], steps_per_generation: int
) -> None:
    """Weight, keep and mismatch diagnostics, all finite; staleness where TRL computed the old log-probs."""
    offpolicy = {
        "preset": "paper/geometric-mask",
        "options": {"low": 0.9, "high": 1.1},
        "correction": {"correct_threshold": 0.5},
    }
    trainer = build(Engine(noise=0.3), offpolicy=offpolicy, steps_per_generation=steps_per_generation)
    trainer.train()
    old = torch.zeros(1, 1) if steps_per_generation == 4 else None
    batch = PolicyBatch(
        per_token_logps=torch.zeros(1, 1),
        old_per_token_logps=old,
        sampling_per_token_logps=torch.zeros(1, 1),
        completion_mask=torch.ones(1, 1),
        advantages=torch.ones(1),
        rewards=torch.ones(1),
        policy_versions=torch.zeros(1, dtype=torch.long),
        current_version=0,
    )
    expected = {key for key in trainer.objective(batch).stats if "/lag/" not in key}
    expected |= {f"offpolicy/gradient/{name}" for name in GRADIENT_METRICS}
    expected |= {f"offpolicy/control/{name}" for name in CONTROL_METRICS[:-3]}  # no controller runs
    expected |= {f"offpolicy/time/{name}" for name in TIME_METRICS}
    assert len(expected) > 90 + 20 * (old is not None)
    rows = records(trainer)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        keys = {key for key in row if key.startswith("offpolicy/")}
        by_lag = {key for key in keys if "/lag/" in key}
        assert {key.rsplit("/", 1)[1] for key in by_lag} >= {"tokens", "logp_diff_mean", "clip_fraction"}
        keys -= by_lag  # a lag without tokens is not logged
        sampled = row["step"] == 1 or steps_per_generation == 2  # in this step
        assert ("offpolicy/rollout/noncanonical_fraction" in keys) is sampled
        keys.discard("offpolicy/rollout/noncanonical_fraction")
        keys -= {f"offpolicy/rollout/{name}" for name in DUPLICATE_METRICS}  # of a generation, not of a loss step
        assert {key for key in keys if not key.endswith("_ci95")} == expected
        assert {key.removesuffix("_ci95") for key in keys - expected} <= expected
        assert all(isinstance(row[key], float) and math.isfinite(row[key]) for key in expected)
    assert rows[0]["offpolicy/mismatch/nonfinite_fraction"] == 0
    assert 0 < rows[0]["offpolicy/keep/dropped_token_fraction"] < 1


def test_writing_rollouts_is_part_of_recording(
    build: Callable[..., OffPolicyGRPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It happens when TRL logs, after its ``step_time`` has ended."""
    original = RolloutRecorder.flush

    def slow(self: RolloutRecorder) -> None:
        time.sleep(0.3)
        original(self)

    monkeypatch.setattr(RolloutRecorder, "flush", slow)
    trainer = build(Engine(noise=0.3))
    trainer.train()
    rows = [row for row in records(trainer) if "step_time" in row]
    assert rows
    for row in rows:
        assert row["offpolicy/time/recording"] > 0.3
        total = sum(row[f"offpolicy/time/{name}"] for name in TIME_METRICS)
        assert row["step_time"] + 0.3 < total < row["step_time"] + row["offpolicy/time/recording"] + 1e-3


def test_a_known_mismatch_is_measured_and_corrected(build: Callable[..., OffPolicyGRPOTrainer]) -> None:
    """An engine 0.1 nats too sure of every token: KL, ratio and weight are known exactly."""
    trainer = build(Engine(shift=0.1), offpolicy="paper/tis")
    trainer.train()
    for row in records(trainer):
        assert row["offpolicy/mismatch/kl_k1"] == pytest.approx(0.1, abs=1e-5)
        assert row["offpolicy/mismatch/logp_diff_max"] == pytest.approx(0.1, abs=1e-5)
        assert row["offpolicy/weight_applied/mean"] == pytest.approx(math.exp(-0.1), abs=1e-5)
        assert row["offpolicy/weight_applied/ess_token"] == pytest.approx(1.0, abs=1e-6)


def test_evaluation_has_its_own_names(build: Callable[..., OffPolicyGRPOTrainer]) -> None:
    trainer = build(Engine(shift=0.1), offpolicy="paper/tis")
    metrics = trainer.evaluate()
    assert metrics["eval_offpolicy/mismatch/kl_k1"] == pytest.approx(0.1, abs=1e-5)
    assert trainer._stats == {} and "eval_pass@1" not in metrics  # what is correct was not said


def test_evaluation_logs_the_share_of_correct_completions(build: Callable[..., OffPolicyGRPOTrainer]) -> None:
    trainer, seen = build(Engine(), correct_threshold=0.2), []

    def watched(**arguments: Any) -> list[float]:
        seen.extend(rewards := score_last_word(**arguments))
        return rewards

    trainer.reward_funcs[0] = watched
    metrics = trainer.evaluate()
    share = float(np.mean([reward >= 0.2 for reward in seen]))
    assert 0 < share < 1 and metrics["eval_pass@1"] == pytest.approx(share)


# ------------------------------------------------------------------------------------------------------------ rollouts


def test_rollouts_have_one_correct_row_per_completion(build: Callable[..., OffPolicyGRPOTrainer]) -> None:
    """TRL shuffles the generation batch: rewards, groups and log-probs must still be those of their completion."""
    engine = Engine(noise=0.3)
    trainer = build(engine, offpolicy={"preset": "paper/geometric-mask", "options": {"low": 0.9, "high": 1.1}})
    trainer.train()
    frame = rollouts(trainer)
    assert set(frame.columns) == COLUMNS
    assert frame.groupby("step").size().to_dict() == {0: 8, 1: 8}
    assert (frame.policy_version == frame.step).all()
    text = frame.completion.str.removesuffix("<eos>")
    np.testing.assert_allclose(frame.reward, score_last_word(list(text)), rtol=1e-5)
    for row in frame.itertuples():
        assert row.completion == trainer.processing_class.decode(row.completion_ids)
        np.testing.assert_allclose(row.sampling_per_token_logps, engine.returned[tuple(row.completion_ids)], rtol=1e-5)
        ratio = np.exp(row.old_per_token_logps - row.sampling_per_token_logps)
        np.testing.assert_allclose(row.weights, np.minimum(ratio, 2.0), rtol=1e-5)
        kept = 0.9 <= np.exp(np.log(ratio).mean()) <= 1.1
        assert row.completion_mask.all() and (row.keep_mask == kept).all()
    for (_, prompt), group in frame.groupby(["step", "prompt"]):
        assert len(group) == GENERATIONS and group.group_id.nunique() == 1, prompt
        advantage = (group.reward - group.reward.mean()) / (group.reward.std() + 1e-4)
        np.testing.assert_allclose(group.advantage, advantage, atol=1e-5)


def test_groups_of_one_step_are_told_apart(build: Callable[..., OffPolicyGRPOTrainer]) -> None:
    """Two generation batches in one optimizer step: four prompts, four group ids."""
    trainer = build(Engine(), gradient_accumulation_steps=4, steps_per_generation=2, max_steps=1)
    trainer.train()
    groups = rollouts(trainer).groupby("group_id")
    assert groups.size().tolist() == [GENERATIONS] * 4
    assert (groups.prompt.nunique() == 1).all()


def test_rollouts_are_recorded_once(build: Callable[..., OffPolicyGRPOTrainer]) -> None:
    """Several iterations reuse a generation batch; its second pass is not another rollout."""
    trainer = build(Engine(), num_iterations=2, max_steps=4)
    trainer.train()
    assert rollouts(trainer).groupby("step").size().to_dict() == {0: 8, 2: 8}


def test_rollouts_can_be_left_out(build: Callable[..., OffPolicyGRPOTrainer]) -> None:
    trainer = build(Engine(), record_rollouts=False, max_steps=1)
    trainer.train()
    assert not (Path(trainer.args.output_dir) / "rollouts.parquet").exists()


# ---------------------------------------------------------------------------------------------------------- run folder


def test_resuming_continues_the_records(build: Callable[..., OffPolicyGRPOTrainer]) -> None:
    """A run of four steps, resumed from its checkpoint at two: every step is there once, from the later run."""
    first = build(max_steps=4, save_strategy="steps", save_steps=2)
    first.train()
    folder, before = Path(first.args.output_dir), records(first)
    build(max_steps=4).train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    after = records(first)
    assert [row["step"] for row in before] == [row["step"] for row in after] == [1, 2, 3, 4]
    assert after[:2] == before[:2]
    assert after[2]["time"] > before[3]["time"]
    rows = rollouts(first)
    assert rows.groupby("step").size().to_dict() == dict.fromkeys(range(4), 8)
    assert rows.groupby("group_id").step.nunique().eq(1).all()  # groups of later steps have numbers of their own
    assert not (folder / "_previous").exists()


def test_a_new_run_archives_the_old_records(build: Callable[..., OffPolicyGRPOTrainer]) -> None:
    first = build(max_steps=2)
    first.train()
    folder, before = Path(first.args.output_dir), records(first)
    second = build(max_steps=1)
    second.train()
    (archive,) = (folder / "_previous").iterdir()
    assert {path.name for path in archive.iterdir()} == {"run.json", "metrics.jsonl", "rollouts.parquet"}
    lines = (archive / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines][: len(before)] == before
    assert [row["step"] for row in records(second)] == [1]
    assert len(rollouts(second)) == 8


def test_run_info_names_preset_and_versions(build: Callable[..., OffPolicyGRPOTrainer]) -> None:
    trainer = build(Engine(), offpolicy="paper/tis", max_steps=1, seed=7)
    trainer.train()
    info = json.loads((Path(trainer.args.output_dir) / "run.json").read_text())
    assert info["preset"] == "paper/tis" and "TruncateWeight" in info["correction"] and info["seed"] == 7
    assert info["versions"]["trl"] == trl.__version__


# ------------------------------------------------------------------------------------------------------------ refusals

TIS = {"weight": {"type": "truncate", "max_weight": 2.0}}
REFUSED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "TRL's own correction": (
        {"vllm_importance_sampling_correction": True},
        r"vllm_importance_sampling_correction must be False.*offpolicy",
    ),
    "unknown key": ({"offpolicy": {"corection": TIS}}, r"offpolicy\.corection.*Did you mean 'correction'"),
    "unknown preset": ({"offpolicy": "paper/tiss"}, r"'paper/tiss'.*Did you mean.*'paper/tis'"),
    "unknown option": (
        {"offpolicy": {"preset": "paper/tis", "options": {"max_wight": 2.0}}},
        r"max_wight.*Did you mean 'max_weight'",
    ),
    "unknown term": (
        {"offpolicy": {"correction": {"keep": [{"type": "ratio_bnad"}]}}},
        r"keep\[0\]\.type.*'ratio_band'",
    ),
    "sequence mask twice": (
        {"offpolicy": "paper/opsm", "off_policy_mask_threshold": 0.1},
        "off_policy_mask_threshold and offpolicy both set an off-policy sequence mask",
    ),
    "loss twice": (
        {"offpolicy": {"objective": {"policy_loss": {"type": "cispo"}}}, "epsilon": 0.1},
        r"offpolicy\.objective\.policy_loss and epsilon set the same quantity",
    ),
    "aggregation twice": (
        {"offpolicy": {"objective": {"aggregation": "token_mean"}}, "loss_type": "grpo"},
        r"offpolicy\.objective\.aggregation and loss_type set the same quantity",
    ),
    "kl twice": (
        {"offpolicy": {"objective": {"kl": {"coef": 0.1}}}, "beta": 0.1},
        r"offpolicy\.objective\.kl and beta set the same quantity",
    ),
    "entropy twice": (
        {"offpolicy": {"objective": {"entropy_coef": 0.1}}, "entropy_coef": 0.1},
        r"offpolicy\.objective\.entropy_coef and entropy_coef set the same quantity",
    ),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_refused_configurations(make_args: Callable[..., OffPolicyGRPOConfig], name: str) -> None:
    options, message = REFUSED_CONFIGS[name]
    with pytest.raises(ValueError, match=message):
        make_args(**options)


def test_a_value_equal_to_the_default_is_not_a_second_setting(make_args: Callable[..., OffPolicyGRPOConfig]) -> None:
    args = make_args(offpolicy={"objective": {"policy_loss": {"type": "cispo"}}}, epsilon=0.2)
    assert type(args.preset.objective.policy_loss).__name__ == "CISPO"


REFUSED_TRAINERS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no engine": ({"offpolicy": "paper/tis"}, ValueError, "must not read the sampling policy when use_vllm is False"),
    "repetition_penalty": (
        {"use_vllm": True, "repetition_penalty": 1.2},
        ValueError,
        r"repetition_penalty=1\.2.*biased",
    ),
    "generation_kwargs": (
        {"use_vllm": True, "generation_kwargs": {"logprobs": 5}},
        ValueError,
        r"generation_kwargs\.logprobs.*most likely token",
    ),
}


@pytest.mark.parametrize("name", REFUSED_TRAINERS)
def test_refused_trainers(make_args: Callable[..., OffPolicyGRPOConfig], name: str) -> None:
    """Refused before a model or an engine is loaded."""
    options, error, message = REFUSED_TRAINERS[name]
    with pytest.raises(error, match=message):
        OffPolicyGRPOTrainer("no such model", score_last_word, make_args(**options))


def test_arguments_of_another_type(tmp_path: Path) -> None:
    args = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(TypeError, match="args must be an OffPolicyGRPOConfig, but got GRPOConfig"):
        OffPolicyGRPOTrainer("no such model", score_last_word, args)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- non-finite


def _poison(monkeypatch: pytest.MonkeyPatch, *, trainable: bool) -> None:
    """The model returns one NaN: on the first trainable token, or on the first token of the padding."""
    original = trl.GRPOTrainer._get_per_token_logps_and_entropies

    def poisoned(
        self: Any, model: Any, input_ids: Any, attention_mask: Any, keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        logps, *others = original(self, model, input_ids, attention_mask, keep, *args, **kwargs)
        where = (attention_mask[:, -keep:] == trainable).nonzero()[0]
        here = torch.zeros_like(logps, dtype=torch.bool)
        here[tuple(where)] = True
        return logps.masked_fill(here, math.nan), *others

    monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", poisoned)


def _stops_before_the_step(
    trainer: OffPolicyGRPOTrainer, message: str, monkeypatch: pytest.MonkeyPatch, *, counted_only: bool
) -> None:
    """On an accelerator the objective only counts; the trainer raises before the optimizer steps."""
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    if counted_only:
        monkeypatch.setattr(objectives, "_check_current", lambda batch: None)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("counted_only", [False, True], ids=["cpu", "accelerator"])
def test_nan_of_the_model_stops_the_run(
    build: Callable[..., OffPolicyGRPOTrainer], monkeypatch: pytest.MonkeyPatch, counted_only: bool
) -> None:
    _poison(monkeypatch, trainable=True)
    said = r"per_token_logps must be finite on trainable tokens.*the model itself"
    _stops_before_the_step(build(max_steps=1), said, monkeypatch, counted_only=counted_only)


@pytest.mark.parametrize("counted_only", [False, True], ids=["cpu", "accelerator"])
def test_nan_of_an_advantage_stops_the_run(
    build: Callable[..., OffPolicyGRPOTrainer], monkeypatch: pytest.MonkeyPatch, counted_only: bool
) -> None:
    original = OffPolicyGRPOTrainer._generate_and_score_completions

    def poisoned(self: OffPolicyGRPOTrainer, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = original(self, inputs)
        return output | {"advantages": torch.full_like(output["advantages"], math.nan)}

    monkeypatch.setattr(OffPolicyGRPOTrainer, "_generate_and_score_completions", poisoned)
    said = r"^advantages must be finite on trainable tokens"
    _stops_before_the_step(build(max_steps=1), said, monkeypatch, counted_only=counted_only)


def test_nan_on_padding_is_harmless(
    build: Callable[..., OffPolicyGRPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build(Engine(noise=0.3), offpolicy="paper/tis", max_steps=1, trim_padding=False)  # or none may be left
    _poison(monkeypatch, trainable=False)
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    (row,) = records(trainer)
    assert math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])
