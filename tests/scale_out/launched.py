"""``recipes/grpo.py`` as ``accelerate launch`` starts it, with rollouts of its own; every rank leaves what it saw.

    accelerate launch --config_file recipes/accelerate/cpu_zero3.yaml tests/scale_out/launched.py --config CONFIG ...

The recipe runs as it is. Only the rollouts come from here: the words depend on the prompt and the row alone, so that
one process and two train on the same data. ``OUTPUT_DIR/rank-N.pt`` then says what rank N held.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scale_out.fsdp2_on_cpu import allow_fsdp2_on_cpu
from scale_out.vllm_weights import engine_weights, keep_plain_weights
from tiny_models import score_last_word
from trainer_runs import Engine

from recipes import grpo
from trl_offpolicy.engines.weights.source import ModelWeights
from trl_offpolicy.rollouts import one_sequence
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer


class Words:
    """A ``rollout_func``: words by prompt and row; log-probs of the engine if there is one, else -5, plus a shift."""

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(prompts)["input_ids"]
        first = trainer.accelerator.process_index * len(prompts)
        completions, shifts = [], []
        for row, ids in enumerate(prompt_ids):
            words = Engine()
            words.random.manual_seed(97 * sum(ids) + (first + row) % trainer.num_generations)
            completions.append(words._words())
            shifts.append((0.2 * torch.randn(len(completions[-1]), generator=words.random)).tolist())
        engine = getattr(trainer, "vllm_generation", None)
        if engine is None:
            known = [[-5.0] * len(ids) for ids in completions]
        else:
            whole = [[*prompt, *ids] for prompt, ids in zip(prompt_ids, completions, strict=True)]
            known = [row[-len(ids) :] for row, ids in zip(engine.score(whole), completions, strict=True)]
        logprobs = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(known, shifts, strict=True)]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}


class Watched(OffPolicyGRPOTrainer):
    """The trainer of the recipe, kept after the recipe is done."""

    last: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, rollout_func=Words(), **kwargs)
        Watched.last = self


def local_count(parameter: nn.Parameter) -> int:
    """Elements that this rank holds."""
    if hasattr(parameter, "ds_tensor"):
        return int(parameter.ds_tensor.numel())
    return int((parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel())


def whole_count(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def kind(parameter: nn.Parameter) -> str:
    if hasattr(parameter, "ds_tensor"):
        return "ds_tensor"
    return "DTensor" if hasattr(parameter, "to_local") else "whole"


def seen(trainer: Any) -> dict[str, Any]:
    """What this rank holds after training. Collective."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    merged: dict[str, Tensor] = {name: value.detach().clone() for name, value in ModelWeights(model).merged()}
    adapter = ModelWeights(model).adapter()
    engine = getattr(trainer, "vllm_generation", None)
    if engine is not None:
        engine.sync_weights()  # the last step's, too
    return {
        "world": trainer.accelerator.num_processes,
        "type": str(trainer.accelerator.distributed_type.value),
        "kinds": {kind(p) for p in parameters},
        "share": sum(map(local_count, parameters)) / sum(map(whole_count, parameters)),
        "wrapper": type(trainer.model_wrapped).__name__,
        "weights": merged,
        "adapter": None if adapter is None else adapter.tensors,
        "engine": None if engine is None or engine.settings.transfer == "adapter" else engine_weights(engine.llm),
        "logs": trainer.state.log_history,
        "step": trainer.state.global_step,
        "sequences": len(SEQUENCES),
    }


SEQUENCES: list[int] = []
"""One entry for each forward whose rows passed as one sequence."""


def count_sequences() -> None:
    """Note each such forward."""
    original = one_sequence.forward

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        SEQUENCES.append(1)
        return original(*args, **kwargs)

    one_sequence.forward = counted


def main() -> None:
    """Run the recipe and leave what was seen."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        allow_fsdp2_on_cpu()
    keep_plain_weights()
    count_sequences()
    grpo.OffPolicyGRPOTrainer = Watched
    grpo.REWARDS["last_word"] = score_last_word
    grpo.main()
    trainer = Watched.last
    torch.save(seen(trainer), Path(trainer.args.output_dir) / f"rank-{trainer.accelerator.process_index}.pt")
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
