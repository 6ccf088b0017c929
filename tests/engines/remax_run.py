"""ReMax on a tiny model with a real vLLM in this process, for three steps; prints one JSON line.

    python tests/engines/remax_run.py FOLDER trl [--no-sync]
    python tests/engines/remax_run.py FOLDER lightning [--no-sync]

At each step the advantage of every row is compared with its reward less that of the greedy completion, which is made
here token by token from the plain logits of the policy that learns. ``--no-sync`` leaves the engine at its first
weights, to show that the comparison can fail.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from plain_greedy import plain_greedy
from tiny_models import EOS, save_tiny_model, score_last_word, tiny_prompts, tiny_tokenizer
from transformers import AutoModelForCausalLM

LENGTH, STEPS = 8, 3
REMAX = {"preset": "paper/tis", "advantages": "remax"}
VLLM = {"max_model_len": 64, "seed": 3}


class Compared:
    """What each generation batch shows.

    Args:
        policy: the model that learns.
        model: the folder that it was read from.
    """

    def __init__(self, policy: Any, model: str) -> None:
        # read again, because accelerate binds the forward of a copy to the model that it was copied from
        first = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.policy, self.first, self.tokenizer = policy, first, tiny_tokenizer()
        self.errors: list[float] = []
        self.changed: list[float] = []
        self.largest: list[float] = []

    def add(self, prompts: Sequence[list[int]], rewards: torch.Tensor, advantages: torch.Tensor) -> None:
        """Note how far the advantages are from what they should be, and whether stale weights would be seen."""
        found, changed = [], []
        for prompt in prompts:
            ids, before = (plain_greedy(one, prompt, length=LENGTH, ends={EOS}) for one in (self.policy, self.first))
            (text,) = self.tokenizer.batch_decode([ids], skip_special_tokens=True)
            found.append(score_last_word([text])[0])
            changed.append(ids != before)
        wanted = rewards.double().cpu() - torch.tensor(found, dtype=torch.float64)
        self.errors.append(float((advantages.double().cpu() - wanted).abs().max()))
        self.changed.append(sum(changed) / len(changed))
        self.largest.append(float(advantages.abs().max()))


def with_trl(folder: Path, model: str, synced: bool) -> Compared:
    """A run of the TRL trainer."""
    from trl_offpolicy.trl import engine as trl_engines
    from trl_offpolicy.trl.config import OffPolicyGRPOConfig
    from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

    if not synced:
        trl_engines.TRLEngine.sync_weights = lambda self: None  # type: ignore[method-assign]
    args = OffPolicyGRPOConfig(
        output_dir=str(folder / "run"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        use_vllm=True, vllm_mode="colocate", engine={**VLLM, "dtype": "float32", "enforce_eager": True},
        offpolicy=REMAX, learning_rate=0.01, lr_scheduler_type="constant", max_grad_norm=1e9, max_steps=STEPS,
        per_device_train_batch_size=8, num_generations=4, max_completion_length=LENGTH, logging_steps=1,
        save_strategy="no", write_report=False,
    )  # fmt: skip
    trainer = OffPolicyGRPOTrainer(model, score_last_word, args, train_dataset=tiny_prompts())
    compared, whole = Compared(trainer.model, model), trainer._generate_and_score_completions

    def noted(inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = whole(inputs)
        prompts = [compared.tokenizer(one["prompt"])["input_ids"] for one in inputs]
        compared.add(prompts, output["rewards"], output["advantages"])
        return output

    trainer._generate_and_score_completions = noted  # type: ignore[method-assign]
    trainer.train()
    return compared


def with_lightning(folder: Path, model: str, synced: bool) -> Compared:
    """A run of the Lightning module."""
    from lightning_runs import data, module, trainer

    from lightning_module import engines
    from trl_offpolicy.engines.engine import SyncReport

    def stay(self: Any, version: int) -> SyncReport:
        self.version = version
        return SyncReport(version=version, kind="memory", bytes=0, seconds=0.0)

    if not synced:
        engines.ColocateEngine.sync_weights = stay  # type: ignore[method-assign, attr-defined]
    ours = module(
        {"type": "vllm", **VLLM}, model=model, reward_funcs=score_last_word, correction=REMAX,
        optimizer=partial(torch.optim.AdamW, lr=0.01), sampling={"max_tokens": LENGTH}, tokenizer=None, control="off",
    )  # fmt: skip
    owner, notes = trainer(folder, max_steps=STEPS), []
    whole = ours.generation._generate

    def noted(step: Any) -> Any:
        rows = whole(step)
        if not notes:
            notes.append(Compared(ours.policy, model))
        prompts = [ids[mask.bool()].tolist() for ids, mask in zip(rows["prompt_ids"], rows["prompt_mask"], strict=True)]
        notes[0].add(prompts, rows["rewards"], rows["advantages"])
        return rows

    ours.generation._generate = noted  # type: ignore[method-assign]
    owner.fit(ours, data(micro_batch_size=8))
    (compared,) = notes
    return compared


def main() -> None:
    """Train, then print the differences of each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("trainer", choices=("trl", "lightning"))
    parser.add_argument("--no-sync", action="store_true")
    options = parser.parse_args()
    run = with_trl if options.trainer == "trl" else with_lightning
    seen = run(options.folder, str(save_tiny_model(options.folder / "model")), not options.no_sync)
    print(json.dumps({"errors": seen.errors, "changed": seen.changed, "largest": seen.largest}))


if __name__ == "__main__":
    main()
