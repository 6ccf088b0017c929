"""Steps on two processes that sample with transformers' ``generate`` from a sharded policy, with a KL reference.

python tests/lightning/sharded_generate_run.py FOLDER ddp|fsdp2|fsdp|zero3 [--lora]

Every rank leaves each call of ``generate`` with the random state before it, the whole weights before each step, and
the log-probs that the loss read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import lightning.pytorch as pl
from lightning_runs import data, module, trainer
from lightning_shards import GENERATE_STEPS, PROMPTS, Shards, generate_settings, strategy_of


class Calls(Shards):
    """Keeps what a rank samples and learns from."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []
        self.scores: list[torch.Tensor] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.keep_weights(trainer, pl_module)
        policy, score = pl_module.policy, pl_module.score
        generate = policy.generate

        def noted_generate(**options: Any) -> Any:
            state = torch.get_rng_state()
            out = generate(**options)
            if trainer.training:
                self.calls.append({"state": state, "options": options, "out": out})
            return out

        def noted_score(*args: Any, **options: Any) -> Any:
            scores = score(*args, **options)
            if scores.logps.requires_grad:
                self.scores.append(scores.logps.detach().clone())
            return scores

        policy.generate, pl_module.score = noted_generate, noted_score


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind")
    parser.add_argument("--lora", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    watch = Calls()
    ours = module("transformers", **generate_settings(lora=given.lora))
    owner = trainer(given.folder, devices=2, strategy=strategy_of(given.kind, on_gpu=False), callbacks=[watch],
                    max_steps=GENERATE_STEPS, val_check_interval=1, limit_val_batches=1)  # fmt: skip
    owner.fit(ours, data(PROMPTS[4:], val_dataset=PROMPTS[:4], val_batch_size=2))
    seen = {"weights": watch.weights, "logs": watch.logs, "calls": watch.calls, "scores": watch.scores,
            "reward": float(owner.callback_metrics["eval_reward"])}  # fmt: skip
    torch.save(seen, given.folder / f"{given.kind}{'-lora' * given.lora}-{owner.global_rank}.pt")


if __name__ == "__main__":
    main()
