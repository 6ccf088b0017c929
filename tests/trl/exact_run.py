"""Train a tiny model for a step under TRL with a real vLLM engine and ``engine: {exact: true}``; prints one JSON line.

python tests/trl/exact_run.py FOLDER [ENGINE_AS_JSON]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_models import save_tiny_model, spread, tiny_prompts

from trl_offpolicy.config import OffPolicyGRPOConfig
from trl_offpolicy.trainer import OffPolicyGRPOTrainer


def main() -> None:
    """Train two steps; print the entry ``exact`` of run.json and the mismatch of the first step."""
    folder = Path(sys.argv[1])
    engine = {"max_model_len": 64, "seed": 3, **(json.loads(sys.argv[2]) if len(sys.argv) > 2 else {"exact": True})}
    args = OffPolicyGRPOConfig(
        output_dir=str(folder / "run"),
        use_cpu=True,
        bf16=None if engine.get("exact") else False,
        gradient_checkpointing=False,
        report_to="none",
        use_vllm=True,
        vllm_mode="colocate",
        engine=engine,
        learning_rate=0.01,
        max_steps=2,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        logging_steps=1,
        save_strategy="no",
        write_report=False,
    )
    model = str(save_tiny_model(folder / "model"))
    trainer = OffPolicyGRPOTrainer(model, spread, args, train_dataset=tiny_prompts())
    trainer.train()
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    logged = [row["offpolicy/mismatch/kl_k3"] for row in lines if "loss" in row]
    info = json.loads((folder / "run" / "run.json").read_text())
    print(json.dumps({"exact": info.get("exact"), "kl_k3": logged, "bf16": args.bf16}))


if __name__ == "__main__":
    main()
