"""Train a tiny model for three steps with a real vLLM engine in this process; prints one JSON line.

    python tests/engines/colocate_run.py FOLDER [--no-sync | --lost-sync] [--lora] [--transfer T] [--rounding int8]
        [--rounded-learner] [--preset paper/qarl] [--dtype D] [--steps N] [--noise] [--drafts]

A process of its own for each scenario: an engine cannot be built twice in one. ``--no-sync`` leaves the engine at its
first weights, to show that the agreement test can fail; ``--lost-sync`` loses the second sync on its way.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import yaml
from accelerate.utils import gather_object
from peft import LoraConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_models import DRAFTS, save_tiny_model, spread, tiny_prompts

from trl_offpolicy.engines.norm_noise import NoisyNorms, norms
from trl_offpolicy.run_folder.syncs import read_syncs
from trl_offpolicy.trl import engine as trl_engines
from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

LORA_TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
MISMATCH = "offpolicy/mismatch/logp_diff_max"

AGREEMENT = "offpolicy/rollout/sync_agreement"
BYTES = "offpolicy/rollout/sync_bytes"
TAKEN = "offpolicy/rollout/draft_taken_fraction"
NOISE = "offpolicy/rollout/norm_noise"
DRAWS = "offpolicy/rollout"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-sync", action="store_true")
    parser.add_argument("--lost-sync", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--transfer", default="auto")
    parser.add_argument("--rounding")
    parser.add_argument("--rounded-learner", action="store_true")
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--preset", type=yaml.safe_load, default="paper/tis")
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def lose_the_second_sync() -> None:
    """The trainer sends its weights, but the engine does not get them."""
    original, calls = trl_engines.reload_in_process, []

    def lose_the_second(llm, weights, **how):  # type: ignore[no-untyped-def]
        calls.append(None)
        return original(llm, weights, **how) if len(calls) == 1 else sum(tensor.nbytes for _, tensor in weights)

    trl_engines.reload_in_process = lose_the_second


def noted_norms() -> list[float]:
    """What the norms of this rank's engine add up to, each time that they have got noise."""
    sums: list[float] = []
    original = NoisyNorms.on

    def on(self: NoisyNorms, version: int, sigma: float) -> None:
        original(self, version, sigma)
        if sigma:
            sums.append(sum(float(weight.double().sum()) for weight in norms(self._model()).values()))

    NoisyNorms.on = on  # type: ignore[method-assign]
    return sums


def main() -> None:
    """Train, then print the largest |log-ratio| of every step and the engine's settings."""
    options = parse()
    model = save_tiny_model(options.folder / "model")
    if options.no_sync:
        trl_engines.TRLEngine.sync_weights = lambda self: None  # type: ignore[method-assign]
    if options.lost_sync:
        lose_the_second_sync()
    noisy = noted_norms()
    engine = {
        "dtype": options.dtype,
        "enforce_eager": True,
        "max_model_len": 64,
        "seed": 3,
        "transfer": options.transfer,
    }
    engine |= {"weight_rounding": options.rounding} if options.rounding else {}
    engine |= {"norm_noise": {"start": 0.3, "end": 0.1, "stages": 3}} if options.noise else {}
    engine |= {"speculative_config": DRAFTS} if options.drafts else {}
    args = OffPolicyGRPOConfig(
        output_dir=str(options.folder / "run"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        use_vllm=True,
        vllm_mode="colocate",
        engine=engine,
        learner_rounding="engine" if options.rounded_learner else None,
        offpolicy=options.preset,
        learning_rate=5.0 if options.lora else 0.01,
        lr_scheduler_type="constant",
        optim="sgd" if options.lora else "adamw_torch",
        max_grad_norm=1e9,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        num_generations=options.generations,
        max_completion_length=8,
        logging_steps=1,
        save_strategy="no",
        write_report=False,
    )
    trainer = OffPolicyGRPOTrainer(
        str(model), spread, args, train_dataset=tiny_prompts(),
        peft_config=LoraConfig(r=4, target_modules=LORA_TARGETS) if options.lora else None,
    )  # fmt: skip
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    noisy_engine = "norm_noise" in (args.engine or {})
    held_out = trainer.evaluate(tiny_prompts(8)) if noisy_engine else {}
    noisy_by_rank = gather_object([noisy])
    if not trainer.accelerator.is_main_process:
        return
    moved = max(float((value - before[name]).abs().max()) for name, value in trainer.model.named_parameters())
    rows = [json.loads(line) for line in (options.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    llm_config = trainer.vllm_generation.llm.llm_engine.vllm_config.model_config
    print(
        json.dumps(
            {
                "mismatch": [row[MISMATCH] for row in rows if MISMATCH in row],
                "agreement": [row[AGREEMENT] for row in rows if AGREEMENT in row],
                "noise": [row[NOISE] for row in rows if NOISE in row],
                "noisy_norms": noisy_by_rank,
                "taken": [row[TAKEN] for row in rows if TAKEN in row],
                "held_out": held_out.get(f"eval_{MISMATCH}"),
                "bytes": [row[BYTES] for row in rows if BYTES in row],
                "syncs": [(sync.changed, sync.visible, sync.checksum) for sync in read_syncs(options.folder / "run")],
                "moved": moved,
                "distinct": [row[f"{DRAWS}/distinct_fraction"] for row in rows if f"{DRAWS}/distinct_fraction" in row],
                "copied": [row.get(f"{DRAWS}/copied_fraction", 0.0) for row in rows if "loss" in row],
                "ranks": trainer.accelerator.num_processes,
                "dtype": str(llm_config.dtype),
                "max_model_len": llm_config.max_model_len,
                "enforce_eager": llm_config.enforce_eager,
            }
        )
    )


if __name__ == "__main__":
    main()
