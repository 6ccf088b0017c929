"""Train a tiny model with a real vLLM server; prints one JSON line.

    python tests/engines/server/server_run.py FOLDER URL [--lora] [--transfer T] [--steps N] [--resume] [--pause-at N]

``--pause-at`` waits before step N until the file FOLDER/go exists, so that a test can do something to the server.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from peft import LoraConfig
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from engines.colocate_run import AGREEMENT, BYTES, LORA_TARGETS, MISMATCH
from tiny_models import spread, tiny_prompts

from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer


class PauseAt(TrainerCallback):
    """Waits at the end of step N for the file."""

    def __init__(self, step: int, folder: Path) -> None:
        self.step, self.folder = step, folder

    def on_step_end(self, args, state, control, **_):  # type: ignore[no-untyped-def]
        if state.global_step == self.step:
            (self.folder / "waiting").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.1)


def main() -> None:
    """Train and print what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--transfer", default="auto")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--pause-at", type=int)
    options = parser.parse_args()
    args = OffPolicyGRPOConfig(
        output_dir=str(options.folder / "run"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=options.url,
        vllm_server_timeout=5.0,
        engine={"transfer": options.transfer, "retries": 1, "timeout": 30.0},
        offpolicy="paper/tis",
        learning_rate=5.0 if options.lora else 0.01,
        lr_scheduler_type="constant",
        optim="sgd" if options.lora else "adamw_torch",
        max_grad_norm=1e9,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        logging_steps=1,
        save_strategy="no",
        write_report=False,
    )
    trainer = OffPolicyGRPOTrainer(
        options.model, spread, args, train_dataset=tiny_prompts(),
        peft_config=LoraConfig(r=4, target_modules=LORA_TARGETS) if options.lora else None,
        callbacks=[PauseAt(options.pause_at, options.folder)] if options.pause_at else None,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=options.resume or None)
    if not trainer.accelerator.is_main_process:
        return
    rows = [json.loads(line) for line in (options.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    kept = {"mismatch": MISMATCH, "agreement": AGREEMENT, "bytes": BYTES}
    print(
        json.dumps(
            {name: [row[key] for row in rows if key in row] for name, key in kept.items()}
            | {"steps": trainer.state.global_step, "processes": trainer.accelerator.num_processes}
        )
    )


if __name__ == "__main__":
    main()
