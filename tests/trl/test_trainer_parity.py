"""OffPolicyGRPOTrainer against stock TRL: the same weights and inputs give the same loss, gradient and metrics.

Every case builds both trainers on copies of one tiny model, hands the same hand-made batch to both ``_compute_loss``
and compares. The batch has ragged rows (one of them empty), advantages of both signs, and old log-probs so far from
the current ones that every clip is active on some token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import trl
from tiny_models import EOS, FIRST_WORD, PAD, VOCABULARY, score_last_word, tiny_prompts
from torch import Tensor

from trl_offpolicy import presets
from trl_offpolicy.metrics.trl_names import trl_names
from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

ROWS, PROMPT, LENGTH, MAX_LENGTH = 6, 4, 8, 10
LENGTHS = (8, 5, 0, 3, 8, 1)
FULL_LENGTHS = (8, 5, 4, 3, 8, 1)
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
LEVELS = ("token", "sequence")
LOSS_OPTIONS = {"cispo": {"epsilon_high": 1.1}}  # there it is the cap of the ratio itself
CORRECTION_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LIMIT = 1e-5
"""Largest difference allowed: absolute, plus as much relative to the largest entry of the gradient, whose norm must
agree to 3 times this, relative."""
ROW_MEANS = {
    "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio", "vespo/phi_seq_mean"
}  # fmt: skip
"""Where the ratio is one a sequence TRL averages these over all rows, this kit over rows with a trainable token."""


class Pair(NamedTuple):
    """Both trainers on their own copy of the same weights."""

    stock: Any
    ours: Any

    def accumulate(self, steps: int) -> None:
        """Micro-batches of the current optimizer step; transformers sets this in its training loop."""
        for trainer in self:
            trainer.current_gradient_accumulation_steps = steps


@pytest.fixture
def build(fresh_model: Callable[..., Any], tokenizer: Any, tmp_path: Path) -> Callable[..., Pair]:
    """``build(kind="llama", **options)``: both trainers with these ``GRPOConfig`` options."""

    def pair(kind: str = "llama", *, rollout_func: Any = None, **options: Any) -> Pair:
        options = {
            "output_dir": str(tmp_path),
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "gradient_checkpointing": False,
            "disable_dropout": True,
            "per_device_train_batch_size": ROWS,
            "num_generations": 2,
            "max_completion_length": MAX_LENGTH,
            **options,
        }
        own = OffPolicyGRPOConfig(**options, record_rollouts=False, write_report=False)
        data = {"train_dataset": tiny_prompts(), "processing_class": tokenizer, "rollout_func": rollout_func}
        built = Pair(
            trl.GRPOTrainer(fresh_model(kind), score_last_word, trl.GRPOConfig(**options), **data),
            OffPolicyGRPOTrainer(fresh_model(kind), score_last_word, own, **data),
        )
        built.accumulate(own.gradient_accumulation_steps)
        for trainer in built:
            trainer.model.train()
        return built

    return pair


@torch.no_grad()
def loss_inputs(
    model: Any,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    tool_mask: bool = False,
    advantages: str = "row",
    without: tuple[str, ...] = (),
    seed: int = 0,
) -> dict[str, Tensor]:
    """One micro-batch as TRL's ``_prepare_inputs`` returns it, with every optional log-prob not in ``without``."""
    random = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, LENGTH, generator=random)

    ids = torch.randint(FIRST_WORD, len(VOCABULARY), (ROWS, PROMPT + LENGTH), generator=random)
    mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).long()
    prompt_mask = (torch.arange(PROMPT) >= torch.tensor([0, 1, 2, 3, 0, 1])[:, None]).long()
    prompt_ids, completion_ids = ids.split([PROMPT, LENGTH], dim=1)
    prompt_ids = prompt_ids.where(prompt_mask.bool(), PAD)
    completion_ids = completion_ids.where(mask.bool(), PAD)
    completion_ids[1, lengths[1] - 1] = EOS
    sequence, attention = torch.cat([prompt_ids, completion_ids], 1), torch.cat([prompt_mask, mask], 1)
    logits = type(model).forward(model, input_ids=sequence, attention_mask=attention).logits[:, PROMPT - 1 : -1]
    current = logits.log_softmax(-1).gather(-1, completion_ids[..., None])[..., 0]
    old = current - torch.tensor([0.5, -0.5, 0.0, 0.4, 0.0, -0.4])[:, None] + noise(0.2)
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": mask,
        "advantages": torch.tensor([0.5, -0.35, 0.25, -0.65, 0.1, 0.45]),
        "old_per_token_logps": old * mask,
        "sampling_per_token_logps": (old - torch.tensor([0.0, 0.7, 0.0, -0.7, 0.2, -0.2])[:, None] + noise(0.3)) * mask,
        "ref_per_token_logps": (current + noise(0.5)) * mask,
    }
    if advantages == "token":
        inputs["advantages"] = inputs["advantages"][:, None] + noise(0.3)
    if tool_mask:
        inputs["tool_mask"] = (torch.rand(ROWS, LENGTH, generator=random) < 0.7).long()
    trainable = mask * inputs.get("tool_mask", torch.ones_like(mask))
    inputs["num_items_in_batch"] = (2.3 * trainable.sum()).long()  # of the whole generation batch
    return {name: value for name, value in inputs.items() if name not in without}


def stock_ratio(inputs: dict[str, Tensor], mode: str, high: float | None, low: float | None) -> Tensor:
    """``importance_sampling_ratio`` as TRL's ``_generate_and_score_completions`` computes it."""
    mask = inputs["completion_mask"] * inputs.get("tool_mask", torch.ones_like(inputs["completion_mask"]))
    difference = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]) * mask
    difference = torch.nan_to_num(difference, nan=0.0)
    ratio = (difference.sum(dim=-1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    if mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    bottom, top = (-math.inf if low is None else low), (math.inf if high is None else high)
    return ratio.masked_fill((ratio < bottom) | (ratio > top), 0.0)


def backward(trainer: Any, inputs: dict[str, Tensor]) -> tuple[float, Tensor]:
    """Loss and the gradient of all parameters in one vector."""
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, dict(inputs))
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainer.model.parameters()]
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


def assert_same(
    pair: Pair,
    inputs: dict[str, Tensor],
    stock_inputs: dict[str, Tensor] | None = None,
    *,
    skip: Collection[str] = (),
) -> dict[str, float]:
    """Equal loss, gradient and metrics, and a gradient that is not trivially zero; returns our own diagnostics."""
    mode = "train" if pair.stock.model.training else "eval"
    expected_loss, expected = backward(pair.stock, stock_inputs or inputs)
    loss, gradient = backward(pair.ours, inputs)
    assert expected.norm() > 1e-3
    assert loss == pytest.approx(expected_loss, abs=LIMIT, rel=0)
    assert (gradient - expected).abs().max() <= LIMIT * (1 + expected.abs().max())
    assert (gradient - expected).norm() <= 3 * LIMIT * expected.norm()
    stats = pair.ours._stats.pop(mode).compute()
    logged, stock_logged = (
        {key: values[-1] for key, values in trainer._metrics[mode].items()} | names
        for trainer, names in ((pair.ours, trl_names(pair.ours.objective, stats)), (pair.stock, {}))
    )
    assert logged.keys() == stock_logged.keys()
    trainable = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    per_sequence = pair.stock.importance_sampling_level == "sequence" or pair.stock.loss_type == "vespo"
    skipped = ROW_MEANS if per_sequence and not bool(trainable.any(-1).all()) else set()
    compared = sorted(logged.keys() - skipped - set(skip))
    assert [logged[k] for k in compared] == pytest.approx([stock_logged[k] for k in compared], abs=LIMIT), compared
    return stats


# ------------------------------------------------------------------------------------------------------------ losses


@pytest.mark.parametrize("tool_mask", [False, True], ids=["plain", "tool_mask"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_losses(build: Callable[..., Pair], loss_type: str, level: str, tool_mask: bool) -> None:
    pair = build(loss_type=loss_type, importance_sampling_level=level, **LOSS_OPTIONS.get(loss_type, {}))
    assert_same(pair, loss_inputs(pair.stock.model, tool_mask=tool_mask))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_metrics_and_active_clips(build: Callable[..., Pair], loss_type: str, level: str) -> None:
    """On a batch without empty rows every metric is equal, and each clip is active, so that it can differ."""
    pair = build(loss_type=loss_type, importance_sampling_level=level, **LOSS_OPTIONS.get(loss_type, {}))
    stats = assert_same(pair, loss_inputs(pair.stock.model, lengths=FULL_LENGTHS))
    if loss_type not in ("sapo", "vespo"):
        assert 0 < stats["offpolicy/loss/clip_high_fraction"] < 1
    if loss_type not in ("sapo", "vespo", "cispo"):
        assert 0 < stats["offpolicy/loss/clip_low_fraction"] < 1


def test_row_means_leave_out_rows_without_a_trainable_token(build: Callable[..., Pair]) -> None:
    """The one deliberate difference from TRL's metrics: its share of clipped sequences counts the empty row."""
    pair = build(importance_sampling_level="sequence")
    stats = assert_same(pair, loss_inputs(pair.stock.model))
    stock = pair.stock._metrics["train"]["clip_ratio/high_mean"][-1]
    assert 0 < stock * ROWS == pytest.approx(stats["offpolicy/loss/clip_high_fraction"] * (ROWS - 1))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_aligned_steps_have_no_old_log_probs(build: Callable[..., Pair], loss_type: str, level: str) -> None:
    pair = build(loss_type=loss_type, importance_sampling_level=level)
    assert_same(pair, loss_inputs(pair.stock.model, without=("old_per_token_logps",)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_advantages_per_token(build: Callable[..., Pair], loss_type: str, level: str) -> None:
    pair = build(loss_type=loss_type, importance_sampling_level=level, beta=0.1)
    assert_same(pair, loss_inputs(pair.stock.model, advantages="token", lengths=FULL_LENGTHS))


# ----------------------------------------------------------------------------------------------------------- options

OPTIONS: dict[str, dict[str, Any]] = {
    "clip": {"epsilon": 0.1, "epsilon_high": 0.3},
    "delta": {"delta": 1.5},
    "kl": {"beta": 0.1, "use_bias_correction_kl": False},
    "kl_bias_corrected": {"beta": 0.1, "use_bias_correction_kl": True},
    "entropy_quantile": {"top_entropy_quantile": 0.4},
    "entropy_bonus": {"entropy_coef": 0.05},
    "temperature": {"temperature": 0.7},
    "all": {
        "delta": 1.5, "beta": 0.1, "use_bias_correction_kl": True, "top_entropy_quantile": 0.6, "entropy_coef": -0.05,
    },
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(build: Callable[..., Pair], name: str, loss_type: str, level: str) -> None:
    pair = build(loss_type=loss_type, importance_sampling_level=level, **OPTIONS[name])
    assert_same(pair, loss_inputs(pair.stock.model))


def test_high_entropy_among_more_tokens_than_torch_ranks(build: Callable[..., Pair]) -> None:
    """torch.quantile, which TRL calls, refuses more than 2^24 values."""
    pair = build(top_entropy_quantile=0.25)
    entropies = torch.arange(17_000_000, dtype=torch.float32).mul_(1e-6).view(1000, 17_000)
    rows = {"completion_mask": torch.ones_like(entropies, dtype=torch.bool)}
    with pytest.raises(RuntimeError, match="too large"):
        pair.stock.get_high_entropy_mask(entropies, rows["completion_mask"], 0.75)
    kept = pair.ours._high_entropy_mask(rows, entropies)
    assert kept is not None
    assert kept.sum().item() == pytest.approx(17_000_000 / 4, abs=10)  # neighbours may be equal in float32


def test_delta_below_the_clip(build: Callable[..., Pair]) -> None:
    """TRL caps the ratio at delta before it counts clips, so that its high clip then reads 0; here it is counted."""
    pair = build(delta=1.1)
    high = {"clip_ratio/high_mean", "clip_ratio/high_max", "clip_ratio/region_mean"}
    stats = assert_same(pair, loss_inputs(pair.stock.model), skip=high)
    assert pair.stock._metrics["train"]["clip_ratio/high_mean"] == [0.0]
    assert stats["offpolicy/loss/clip_high_fraction"] > 0


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_accumulation_and_mode(build: Callable[..., Pair], loss_type: str, mode: str) -> None:
    """All options at once, several micro-batches a step and steps a generation; evaluation does not accumulate."""
    pair = build(loss_type=loss_type, gradient_accumulation_steps=2, steps_per_generation=4, **OPTIONS["all"])
    pair.accumulate(3)
    for trainer in pair:
        trainer.model.train(mode == "train")
    assert_same(pair, loss_inputs(pair.stock.model, tool_mask=True))


@pytest.mark.parametrize("coefficient", [None, 0.0, 0.5])
def test_mixture_of_experts(build: Callable[..., Pair], coefficient: float | None) -> None:
    """None is the architecture's own coefficient (0.001); 0 switches the auxiliary loss off."""
    pair = build("qwen3_moe", router_aux_loss_coef=coefficient, gradient_accumulation_steps=2)
    assert pair.ours.aux_loss_enabled == (coefficient != 0.0)
    assert_same(pair, loss_inputs(pair.stock.model))
    assert ("aux_loss" in pair.ours._metrics["train"]) == (coefficient != 0.0)


def test_adaptive_entropy(build: Callable[..., Pair]) -> None:
    """Loss and coefficient agree at every micro-batch of four accumulation windows; the coefficient turns round."""
    pair = build(
        gradient_accumulation_steps=2,
        top_entropy_quantile=0.8,
        use_adaptive_entropy=True,
        entropy_coef=0.02,
        entropy_target=3.4,
        entropy_coef_delta=0.01,
        entropy_coef_min=0.005,
        entropy_coef_max=0.02,
    )
    for call in range(8):
        pair.stock.accelerator.gradient_state._set_sync_gradients(call % 2 == 1)  # shared by both trainers
        assert_same(pair, loss_inputs(pair.stock.model, seed=call))
        assert pair.ours.entropy_coef == pair.stock.entropy_coef
    coefficients = pair.ours._metrics["train"]["entropy_coef"]
    assert coefficients == pair.stock._metrics["train"]["entropy_coef"]
    assert coefficients == pytest.approx([0.01, 0.005, 0.015, 0.02])


# ------------------------------------------------------------------------------------------------- several policies


def use_engine(pair: Pair, *, correction: bool, **options: Any) -> Pair:
    """As if both had been built with vLLM, TRL's own correction on or off; ours gets it through ``from_trl``."""
    mode = {key: value for key, value in options.items() if key.startswith("vllm_importance_sampling")}
    names = ("loss_type", "importance_sampling_level", "beta", "use_bias_correction_kl", "off_policy_mask_threshold")
    objective = presets.from_trl(
        **{name: getattr(pair.ours.args, name) for name in names},
        use_vllm=True,
        vllm_importance_sampling_correction=correction,
        **mode,
    ).objective
    pair.stock.use_vllm, pair.stock.vllm_importance_sampling_correction = True, correction
    pair.ours.objective = objective
    return pair


def with_unscored_tokens(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """vLLM could not score one trainable token, and one of the padding."""
    sampling = inputs["sampling_per_token_logps"].clone()
    sampling[0, 2] = sampling[1, LENGTH - 1] = math.nan
    return {**inputs, "sampling_per_token_logps": sampling}


@pytest.mark.parametrize("bounds", [(3.0, None), (1.3, 0.7)], ids=["default", "tight"])
@pytest.mark.parametrize(
    ("loss_type", "level", "mode"),
    [
        *((loss, "token", mode) for loss in ("dapo", "grpo") for mode in CORRECTION_MODES),
        *(("grpo", "sequence", mode) for mode in CORRECTION_MODES),
        *(("vespo", "token", mode) for mode in CORRECTION_MODES[:2]),  # TRL refuses the others
    ],
)
def test_engine_correction(
    build: Callable[..., Pair], loss_type: str, level: str, mode: str, bounds: tuple[float, float | None]
) -> None:
    high, low = bounds
    pair = use_engine(
        build(loss_type=loss_type, importance_sampling_level=level, beta=0.1),
        correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=high,
        vllm_importance_sampling_clip_min=low,
    )
    inputs = with_unscored_tokens(loss_inputs(pair.stock.model, tool_mask=True))
    ratio = stock_ratio(inputs, mode, high, low)
    stats = assert_same(pair, inputs, {**inputs, "importance_sampling_ratio": ratio})
    if low is not None:
        assert stats["offpolicy/weight/truncated_fraction"] > 0


@pytest.mark.parametrize("advantages", ["row", "token"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "vespo"])
@pytest.mark.parametrize("divergence", ["old", "sampling"])
def test_off_policy_sequence_mask(
    build: Callable[..., Pair], divergence: str, loss_type: str, level: str, advantages: str
) -> None:
    """Measured against the engine where its log-probs are there, else against the old policy."""
    pair = build(loss_type=loss_type, importance_sampling_level=level, off_policy_mask_threshold=0.1, beta=0.1)
    without = ("sampling_per_token_logps",) if divergence == "old" else ()
    inputs = loss_inputs(pair.stock.model, advantages=advantages, without=without, lengths=FULL_LENGTHS)
    if divergence == "sampling":
        use_engine(pair, correction=False)
        inputs = with_unscored_tokens(inputs)
    stats = assert_same(pair, inputs)
    assert 0 < stats["offpolicy/keep/dropped_token_fraction"] < 1


def test_off_policy_sequence_mask_with_correction(build: Callable[..., Pair]) -> None:
    pair = use_engine(build(off_policy_mask_threshold=0.1), correction=True)
    inputs = with_unscored_tokens(loss_inputs(pair.stock.model))
    ratio = stock_ratio(inputs, "sequence_mask", 3.0, None)
    assert_same(pair, inputs, {**inputs, "importance_sampling_ratio": ratio})


def test_off_policy_sequence_mask_with_rollout_func(build: Callable[..., Pair]) -> None:
    """A rollout_func brings log-probs of its own without vLLM; TRL's mask then reads them."""
    pair = build(off_policy_mask_threshold=0.1, rollout_func=lambda prompts, trainer: {})
    assert_same(pair, loss_inputs(pair.stock.model))


# -------------------------------------------------------------------------------------------------------------- RLOO

CLIPS: dict[str, dict[str, Any]] = {
    "defaults": {}, "two bounds": {"epsilon": 0.1, "epsilon_high": 0.4}, "wide": {"epsilon": 0.9}
}  # fmt: skip


@pytest.mark.parametrize("lengths", [FULL_LENGTHS, LENGTHS], ids=["full", "with an empty row"])
@pytest.mark.parametrize("clip", CLIPS)
def test_rloo(fresh_model: Any, tokenizer: Any, tmp_path: Path, clip: str, lengths: tuple[int, ...]) -> None:
    """The preset ``trl/rloo`` has the loss and gradient of TRL's RLOOTrainer; test_rloo.py compares whole runs."""
    spec = {"preset": "trl/rloo", "options": {"beta": 0, **CLIPS[clip]}}
    shared = {
        "output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none",
        "gradient_checkpointing": False, "disable_dropout": True, "per_device_train_batch_size": ROWS,
        "num_generations": 2, "max_completion_length": MAX_LENGTH,
    }  # fmt: skip
    data = {"train_dataset": tiny_prompts(), "processing_class": tokenizer}
    stock = trl.RLOOTrainer(fresh_model(), score_last_word, trl.RLOOConfig(beta=0.0, **CLIPS[clip], **shared), **data)
    own = OffPolicyGRPOConfig(offpolicy=spec, record_rollouts=False, write_report=False, **shared)
    ours = OffPolicyGRPOTrainer(fresh_model(), score_last_word, own, **data)
    ours.current_gradient_accumulation_steps = 1
    ours.model.train()
    stock.model.train()
    inputs = loss_inputs(stock.model, lengths=lengths, without=("ref_per_token_logps",))
    mask = inputs["completion_mask"]
    theirs, wanted = backward(stock, {**inputs, "old_logps": (inputs["old_per_token_logps"] * mask).sum(1)})
    loss, gradient = backward(ours, inputs)
    assert wanted.norm() > 1e-3 and (gradient - wanted).abs().max() <= LIMIT * (1 + wanted.abs().max())
    # TRL counts -A of a row without a token, which has no gradient
    empty = torch.where(mask.any(-1), 0.0, -inputs["advantages"]).sum() / ROWS
    assert loss == pytest.approx(theirs - empty.item(), abs=LIMIT)
    logged = {key: values[-1] for key, values in stock._metrics["train"].items()}
    stats = ours._stats.pop("train").compute()
    if lengths is FULL_LENGTHS:
        assert stats["offpolicy/loss/clip_low_fraction"] == pytest.approx(logged["clip_ratio/low_mean"])
        assert stats["offpolicy/loss/clip_high_fraction"] == pytest.approx(logged["clip_ratio/high_mean"])
        # each side is active somewhere and not everywhere, or it would not have been compared
        assert 0 < logged["clip_ratio/region_mean"] < 1


# -------------------------------------------------------------------------------------------------------------- GMPO

GMPO: dict[str, dict[str, Any]] = {
    "defaults": {},
    "two bounds": {"epsilon": 0.1, "epsilon_high": 0.3},
    "kl": {"epsilon": 0.2, "beta": 0.1},
}


@pytest.mark.parametrize("lengths", [FULL_LENGTHS, LENGTHS], ids=["full", "with an empty row"])
@pytest.mark.parametrize("name", GMPO)
def test_gmpo(fresh_model: Any, tokenizer: Any, tmp_path: Path, name: str, lengths: tuple[int, ...]) -> None:
    """The loss ``gmpo``, a mean over responses, has the loss and gradient of TRL's experimental GMPOTrainer."""
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    options = {"beta": 0.0, **GMPO[name]}
    shared = {
        "output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none", "beta": options["beta"],
        "gradient_checkpointing": False, "disable_dropout": True, "per_device_train_batch_size": ROWS,
        "num_generations": 2, "max_completion_length": MAX_LENGTH,
    }  # fmt: skip
    data = {"train_dataset": tiny_prompts(), "processing_class": tokenizer}
    stock = GMPOTrainer(fresh_model(), score_last_word, GMPOConfig(**{**shared, **options}), **data)
    loss_spec = {"type": "gmpo", "low": stock.epsilon_low, "high": stock.epsilon_high}
    spec = {"objective": {"policy_loss": loss_spec, "aggregation": "seq_mean_token_mean"}}
    unread = {"use_bias_correction_kl": False}  # on by default, and not read by TRL's GMPO loss
    own = OffPolicyGRPOConfig(offpolicy=spec, record_rollouts=False, write_report=False, **unread, **shared)
    ours = OffPolicyGRPOTrainer(fresh_model(), score_last_word, own, **data)
    for trainer in (stock, ours):
        trainer.current_gradient_accumulation_steps = 2
        trainer.model.train()
    inputs = loss_inputs(stock.model, lengths=lengths, without=() if options["beta"] else ("ref_per_token_logps",))
    theirs, wanted = backward(stock, inputs)
    loss, gradient = backward(ours, inputs)
    assert wanted.norm() > 1e-3 and (gradient - wanted).abs().max() <= LIMIT * (1 + wanted.abs().max())
    # TRL counts -A of a row without a token, which has no gradient
    empty = torch.where(inputs["completion_mask"].any(-1), 0.0, -inputs["advantages"]).sum() / ROWS / 2
    assert loss == pytest.approx(theirs - empty.item(), abs=LIMIT)
    logged = {key: values[-1] for key, values in stock._metrics["train"].items()}
    stats = ours._stats.pop("train").compute()
    assert stats["offpolicy/loss/clip_low_fraction"] == pytest.approx(logged["clip_ratio/low_mean"])
    assert stats["offpolicy/loss/clip_high_fraction"] == pytest.approx(logged["clip_ratio/high_mean"])
    assert 0 < logged["clip_ratio/low_mean"] < 1 and 0 < logged["clip_ratio/high_mean"] < 1
