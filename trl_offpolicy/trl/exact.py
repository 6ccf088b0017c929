"""``engine: {exact: true}`` in TRL: what it asks of the configuration, and the check of the first generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from trl.models.utils import disable_gradient_checkpointing

from trl_offpolicy.diagnosis.probe.exactness import Exactness, ask_exact, judge_generation, report_exactness
from trl_offpolicy.engines.exact import exact_trainer
from trl_offpolicy.rollouts.batches import trainable

_REFUSED = {
    "bf16": "autocast rounds what the engine does not; for bfloat16 load the model in it (dtype: bfloat16)",
    "fp16": "autocast rounds what the engine does not; for float16 load the model in it (dtype: float16)",
    "torch_compile": "compiled kernels sum in another order than the engine's",
    "use_liger_kernel": "its kernels sum in another order than the engine's",
}


def wants_exact(engine: Any) -> bool:
    """True if the ``engine`` field of a configuration, which may still be JSON text, says ``exact: true``."""
    if isinstance(engine, str):
        try:
            engine = json.loads(engine)
        except ValueError:
            return False
    return isinstance(engine, dict) and engine.get("exact") is True


def check_config(args: Any) -> None:
    """Raise for fields of a TRL configuration that contradict ``engine.exact``; bf16, if unset, becomes false.

    It is called before TRL fills in its defaults, one of which is ``bf16: true``.

    Raises:
        ValueError: a field contradicts; the message names both.
    """
    if args.bf16 is None:
        args.bf16 = False
    for name, why in _REFUSED.items():
        if getattr(args, name):
            raise ValueError(f"{name} must be false with engine.exact: true, but got {getattr(args, name)!r}: {why}.")
    if not args.disable_dropout:
        raise ValueError(
            "disable_dropout must be true with engine.exact: true, but got False: dropout makes log-probs random."
        )
    if not args.use_vllm:
        raise ValueError(
            "use_vllm must be true with engine.exact: true, but got False: without vLLM the trainer samples from "
            "itself."
        )


def prepare(args: Any, model: Any, given: Any) -> None:
    """What must be set before the trainer is built: torch's options, and the head in float32 for a 16-bit model.

    Raises:
        ValueError: LoRA dropout is above 0.
    """
    if (dropout := getattr(given.get("peft_config"), "lora_dropout", 0.0)) > 0:
        raise ValueError(f"lora_dropout must be 0 with engine.exact: true, but got {dropout}.")
    exact_trainer()
    chosen = (args.model_init_kwargs or {}).get("dtype", "float32") if isinstance(model, str) else model.dtype
    if str(chosen).removeprefix("torch.") != "float32":
        args.cast_lm_head_to_fp32 = True


class ExactRun:
    """Checks the first generation of a run with ``engine.exact``, says what it found and adds it to ``run.json``.

    Args:
        trainer: the trainer, with its engine.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.found: Exactness | None = None
        """What the check found; None before it."""

    @torch.no_grad()
    def check(self, output: dict[str, Any]) -> None:
        """Compare engine and trainer once, on a generation batch as TRL has it. Every rank calls it.

        It costs two forwards over the batch: one in the trainer's micro-batches, one in halves of them.
        """
        sampling = output.get("sampling_per_token_logps")
        if self.found is not None or sampling is None:
            return
        trainer, size = self._trainer, self._trainer.args.per_device_train_batch_size
        mask = trainable(output).bool()
        with disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
            old = trainer._score(trainer.model, output, batch_size=size)[0]
            again = trainer._score(trainer.model, output, batch_size=size // 2)[0] if size > 1 else None
        self.found = judge_generation(
            sampling, old, again, mask,
            asked=ask_exact(
                trainer.vllm_generation,
                trainer.accelerator.unwrap_model(trainer.model),
                trainer.processing_class,
                rows=size,
            ),
        )  # fmt: skip
        if trainer.accelerator.is_main_process:
            report_exactness(self.found, Path(trainer.args.output_dir))


def exact_run(trainer: Any) -> ExactRun | None:
    """The check of a trainer, if its configuration asks for it."""
    return ExactRun(trainer) if wants_exact(cast("dict[str, Any] | None", trainer.args.engine)) else None
