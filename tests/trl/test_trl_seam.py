"""Canary: the private parts of TRL that this kit overrides, calls or rebinds, as they were when it was written.

A new release of TRL that moves one of them fails here with the exact difference, before anything computes a wrong
number. Look at what changed, adapt the code, then take over the new lines: ``python tests/trl/test_trl_seam.py``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SNAPSHOT = Path(__file__).with_name("trl_seam.txt")
METHODS = (
    "__init__", "_generate_and_score_completions", "_calculate_rewards", "_get_per_token_logps_and_entropies",
    "_compute_loss", "log", "create_model_card", "_save_checkpoint",
    "_load_optimizer_and_scheduler", "training_step", "_prepare_inputs", "_generate_single_turn",
    "_generate", "train", "_get_output_dir", "_push_from_checkpoint",
)  # fmt: skip
ATTRIBUTES = (
    "_step", "_metrics", "_logs", "_tokenizer", "_last_world_entropy", "_entropy_bonus_enabled",
    "aux_loss_enabled", "use_adaptive_entropy", "entropy_coef", "top_entropy_quantile", "router_aux_loss_coef",
    "num_iterations", "loss_type", "temperature", "max_completion_length", "reward_weights", "use_vllm", "ref_model",
    "current_gradient_accumulation_steps", "hub_model_id", "tools", "rollout_func", "environment_factories",
)  # fmt: skip


def signatures() -> list[str]:
    """Of the methods and functions that are overridden, called or rebound."""
    from transformers import trainer
    from trl import GRPOTrainer
    from trl.generation import vllm_generation
    from trl.models.utils import disable_gradient_checkpointing
    from trl.trainer import grpo_trainer, utils

    backend = vllm_generation.VLLMGeneration
    found = {f"GRPOTrainer.{name}": getattr(GRPOTrainer, name) for name in METHODS}
    for name in ("__init__", "_init_vllm", "sync_weights", "generate"):
        found[f"VLLMGeneration.{name}"] = getattr(backend, name)
    for owner, name in (
        (utils, "add_fused_lm_head"), (utils, "maybe_gather_lm_head_ctx"), (utils, "split_tensor_dict"),
    ):  # fmt: skip
        found[f"utils.{name}"] = getattr(owner, name)
    found["disable_gradient_checkpointing"] = disable_gradient_checkpointing
    for name in ("add_fused_lm_head", "VLLMGeneration", "PREFIX_CHECKPOINT_DIR", "split_tensor_dict"):
        found[f"grpo_trainer.{name} is a global"] = _present(grpo_trainer, name)
    found["transformers.trainer.PREFIX_CHECKPOINT_DIR is a global"] = _present(trainer, "PREFIX_CHECKPOINT_DIR")
    found["vllm_generation.LLM is a global"] = _present(vllm_generation, "LLM")
    return [f"{name} {made if isinstance(made, str) else inspect.signature(made)}" for name, made in found.items()]


def _present(module: Any, name: str) -> str:
    return str(hasattr(module, name))


def fields_of_a_batch(trainer: Any) -> list[str]:
    """Keys, shapes by letter and dtypes of what TRL hands to the loss, and the attributes that are read."""
    seen: dict[str, Any] = {}
    compute_loss = trainer._compute_loss

    def watch(model: Any, inputs: dict[str, Any]) -> Any:
        seen.update(inputs)
        return compute_loss(model, inputs)

    trainer._compute_loss = watch
    trainer.train()
    sizes = {size: letter for letter, size in zip("TPB", _sizes(seen), strict=True)}
    lines = [f"inputs[{key!r}] {_kind(value, sizes)}" for key, value in sorted(seen.items())]
    return lines + [f"trainer.{name} {type(getattr(trainer, name)).__name__}" for name in ATTRIBUTES]


def _sizes(batch: dict[str, Any]) -> tuple[int, int, int]:
    width, prompt = batch["completion_mask"].shape[1], batch["prompt_mask"].shape[1]
    return width, prompt, batch["completion_mask"].shape[0]


def _kind(value: Any, sizes: dict[int, str]) -> str:
    if not hasattr(value, "shape"):
        return type(value).__name__
    shape = ", ".join(sizes.get(size, str(size)) for size in value.shape)
    return f"({shape}) {str(value.dtype).removeprefix('torch.')}"


def stock_trainer(folder: Path, model: Any, tokenizer: Any) -> Any:
    """A stock ``trl.GRPOTrainer`` with an engine that returns log-probs."""
    import trl
    from tiny_models import score_last_word, tiny_prompts
    from trainer_runs import Engine

    args = trl.GRPOConfig(
        str(folder), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, gradient_checkpointing=False,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, steps_per_generation=4, num_generations=4,
        max_completion_length=6, max_steps=1, save_strategy="no",
    )  # fmt: skip
    return trl.GRPOTrainer(
        model, score_last_word, args, train_dataset=tiny_prompts(), processing_class=tokenizer, rollout_func=Engine()
    )


def difference(then: list[str], now: list[str]) -> str:
    """What was and what is, line by line."""
    return "\n".join(difflib.unified_diff(then, now, "TRL as this kit knows it", "TRL as installed", lineterm="", n=0))


def test_the_seam_of_trl_is_the_known_one(tmp_path: Path, fresh_model: Callable[..., Any], tokenizer: Any) -> None:
    now = signatures() + fields_of_a_batch(stock_trainer(tmp_path, fresh_model(), tokenizer))
    if changed := difference(SNAPSHOT.read_text().splitlines(), now):
        import trl

        pytest.fail(f"TRL {trl.__version__} has another private interface:\n{changed}")


def test_the_difference_names_what_moved() -> None:
    known = SNAPSHOT.read_text().splitlines()
    moved = [line.replace("(self, model, inputs)", "(self, model, batch)") for line in known]
    assert difference(known, known) == ""
    said = difference(known, moved)
    assert "-GRPOTrainer._compute_loss (self, model, inputs)" in said
    assert "+GRPOTrainer._compute_loss (self, model, batch)" in said and "inputs['advantages']" not in said


if __name__ == "__main__":
    import tempfile

    from tiny_models import save_tiny_model, tiny_tokenizer
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as place:
        model = AutoModelForCausalLM.from_pretrained(save_tiny_model(Path(place) / "model"))
        found = signatures() + fields_of_a_batch(stock_trainer(Path(place) / "run", model, tiny_tokenizer()))
    SNAPSHOT.write_text("\n".join(found) + "\n")
    print(f"{SNAPSHOT.name}: {len(found)} lines")
