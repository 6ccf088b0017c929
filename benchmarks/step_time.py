"""Training-step time against stock TRL with its own vLLM correction on: what the skipped old-policy forward saves.

    python benchmarks/step_time.py [--model .cache/SmolLM2-135M-Instruct] [--rounds 8] [--rows 16] [--device cuda]

Both trainers replay the same recorded rollouts (token ids and sampling log-probs), so generation, which is the same
for both, is outside the ratio; everything else of a step is in it: scoring, advantages, correction, loss, backward.
Stock TRL runs with its default correction (sequence_mask), ours with paper/tis. Steps are aligned (one optimizer
step a generation), LoRA, float32 (bfloat16 on a GPU); the two are interleaved, and the printed number is the ratio of
medians. On a GPU it also prints the peak memory of a step.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
from dataclasses import replace
from typing import Any

import torch
from correction_cost import clock_of
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from trl_offpolicy import presets
from trl_offpolicy.config import OffPolicyGRPOConfig
from trl_offpolicy.trainer import OffPolicyGRPOTrainer


def build(trainer_class: Any, config_class: Any, args: argparse.Namespace, **options: Any) -> Any:
    """A trainer without an engine whose generation replays fixed rollouts and pretends that vLLM made them."""
    prompts = Dataset.from_dict({"prompt": ["What is 3 + 4? Answer with just the number."] * 64})
    rows, length, on_gpu = args.rows, args.length, args.device != "cpu"
    config = config_class(
        output_dir=tempfile.mkdtemp(), use_cpu=not on_gpu, bf16=on_gpu, gradient_checkpointing=args.checkpointing,
        report_to="none", per_device_train_batch_size=rows, num_generations=8, max_completion_length=length, **options,
    )  # fmt: skip
    trainer = trainer_class(
        args.model, lambda completions, **_: [float(len(text) % 3) for text in completions], config,
        train_dataset=prompts, peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )  # fmt: skip
    dice = random.Random(0)
    ids = [[dice.randrange(100, 5000) for _ in range(length)] for _ in range(rows)]
    trainer.model.train()
    prompt_ids = trainer._tokenizer(prompts[0]["prompt"])["input_ids"]
    rolled = torch.tensor([prompt_ids + row for row in ids], device=trainer.accelerator.device)
    with torch.no_grad():  # realistic sampling log-probs: the trainer's own plus noise
        logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, rolled, torch.ones_like(rolled), length)
    noisy = [[value + dice.gauss(0.0, 0.02) for value in row] for row in logps.tolist()]
    trainer._generate_single_turn = lambda *_, **__: (ids, noisy)
    trainer.use_vllm = True
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def step(trainer: Any) -> float:
    """Seconds of one training step without the optimizer's update."""
    clock = clock_of(str(trainer.accelerator.device))
    inputs = [{"prompt": trainer.train_dataset[0]["prompt"]}] * trainer.args.per_device_train_batch_size
    started = clock()
    trainer.training_step(trainer.model, inputs, None)
    elapsed = clock() - started
    trainer.model.zero_grad()
    trainer.state.global_step += 1  # what is done once in so many steps (the noise floor) is due as in training
    return elapsed


def main() -> None:
    """Print medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, for long responses")
    args = parser.parse_args()
    stock = build(GRPOTrainer, GRPOConfig, args, vllm_importance_sampling_correction=True)
    ours = build(OffPolicyGRPOTrainer, OffPolicyGRPOConfig, args, record_rollouts=False)
    ours.objective = replace(ours.objective, correction=presets.get("paper/tis").correction)
    seconds: dict[str, list[float]] = {"stock TRL": [], "trl-offpolicy": []}
    memory: dict[str, float] = {}
    for number in range(args.rounds + 1):
        for name, trainer in (("stock TRL", stock), ("trl-offpolicy", ours)):
            if args.device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            elapsed = step(trainer)
            memory[name] = torch.cuda.max_memory_allocated() / 2**30 if args.device != "cpu" else math.nan
            if number > 0:  # the first is warm-up
                seconds[name].append(elapsed)
    for name, values in seconds.items():
        spread = f"median of {len(values)}; {min(values):.2f}-{max(values):.2f}"
        spread += "" if math.isnan(memory[name]) else f"; peak {memory[name]:.2f} GiB, both trainers' weights included"
        print(f"{name:>14}: {statistics.median(values):.2f} s a step ({spread})")
    ratio = statistics.median(seconds["stock TRL"]) / statistics.median(seconds["trl-offpolicy"])
    print(f"stock TRL / trl-offpolicy = {ratio:.2f}, generation not counted")


if __name__ == "__main__":
    main()
