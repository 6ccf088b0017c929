"""A stock trl.GRPOTrainer with a real vLLM engine in this process, attached; prints one JSON line.

    python tests/trl/attach_run.py FOLDER [--correction] [--stock] [--rloo]

With ``--stock`` the engine is TRL's own, too. Otherwise it is this kit's, which can round weights; all else is TRL's.
With ``--rloo`` the trainer is ``trl.RLOOTrainer``, with its own engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import trl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_models import save_tiny_model, spread, tiny_prompts

import trl_offpolicy
from trl_offpolicy.engines.environment import prepare_environment
from trl_offpolicy.trl.engine import trl_engine

ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "seed": 3, "weight_rounding": "int4"}


def main() -> None:
    """Train three steps; print the rows of metrics.jsonl."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--correction", action="store_true")
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--rloo", action="store_true")
    options = parser.parse_args()
    own_engine = options.stock or options.rloo
    correction = {
        "vllm_importance_sampling_correction": options.correction,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.05,
    }
    config = trl.RLOOConfig if options.rloo else partial(trl.GRPOConfig, **correction)
    args = config(
        output_dir=str(options.folder / "run"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        use_vllm=True,
        vllm_mode="colocate",
        learning_rate=0.01,
        max_steps=3,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        logging_steps=1,
        save_strategy="no",
    )
    if own_engine:
        prepare_environment()
    trainer_class = trl.RLOOTrainer if options.rloo else trl.GRPOTrainer
    with nullcontext() if own_engine else trl_engine(ENGINE, folder=options.folder / "weights"):
        model = str(save_tiny_model(options.folder / "model"))
        trainer = trainer_class(model, reward_funcs=spread, args=args, train_dataset=tiny_prompts())
    trl_offpolicy.attach(trainer, write_report=False)
    trainer.train()
    lines = (options.folder / "run" / "metrics.jsonl").read_text().splitlines()
    print(json.dumps([row for row in map(json.loads, lines) if "loss" in row]))


if __name__ == "__main__":
    main()
