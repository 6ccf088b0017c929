"""Train a tiny mixture of experts with a real vLLM in this process; prints one JSON line.

    python tests/engines/routing/moe_run.py FOLDER [--replay none|r2|r3] [--rounding int4] [--lora] [--url URL]

Two optimizer steps on each of two generations. The engine reports its routing except with r2, so that none compares it.
With ``--url`` it is a server of FOLDER/model, which then exists.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from peft import LoraConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tiny_models import save_tiny_model, spread, tiny_prompts

from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

SHOWN = ("routing/agreement", "routing/flip_fraction", "mismatch/logp_diff_mean", "mismatch/kl_k3",
         "staleness/logp_diff_max", "rollout/sync_agreement")  # fmt: skip


def main() -> None:
    """Train, then print the diagnostics of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replay", default="none")
    parser.add_argument("--rounding")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--url")
    options = parser.parse_args()
    model = options.folder / "model" if options.url else save_tiny_model(options.folder / "model", "qwen3_moe")
    engine = {"return_routing": options.replay != "r2"}
    engine |= {} if options.url else {"dtype": "float32", "max_model_len": 64, "seed": 3}
    engine |= {"weight_rounding": options.rounding, "check_sync": False} if options.rounding else {}
    args = OffPolicyGRPOConfig(
        output_dir=str(options.folder / "run"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=True,
        report_to="none",
        use_vllm=True,
        vllm_mode="server" if options.url else "colocate",
        vllm_server_base_url=options.url,
        engine=engine,
        offpolicy="paper/tis",
        routing_replay=options.replay,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_steps=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        steps_per_generation=2,
        num_generations=4,
        max_completion_length=8,
        logging_steps=1,
        save_strategy="no",
        write_report=False,
        disable_tqdm=True,
    )
    trainer = OffPolicyGRPOTrainer(
        str(model), spread, args, train_dataset=tiny_prompts(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if options.lora else None,
    )  # fmt: skip
    trainer.train()
    lines = (options.folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    print(json.dumps([{name: row.get(f"offpolicy/{name}") for name in SHOWN} for row in rows]))


if __name__ == "__main__":
    main()
