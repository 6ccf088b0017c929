"""Train a tiny model ahead of a real vLLM server; prints one JSON line.

python tests/rollouts/ahead/ahead_run.py FOLDER URL --model M [--lag K] [--partial P] [--old-logps O] [--lora]
                                          [--preset paper/dora] [--save N] [--resume] [--tools] [--one-prompt]

Under a configuration of ``recipes/accelerate`` the weights are sharded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from datasets import Dataset
from peft import LoraConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from agent_runs import SHORT_TURNS, conversations, count_letters, lookup, tool_tokenizer, turns
from scale_out.fsdp2_on_cpu import allow_fsdp2_on_cpu
from tiny_models import spread, tiny_prompts

from trl_offpolicy.engines.server import engine
from trl_offpolicy.engines.server.adapters import ServerAdapters
from trl_offpolicy.rollouts.ahead.local_weights import is_sharded
from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

KEYS = {
    "mismatch": "offpolicy/mismatch/logp_diff_max",
    "total": "offpolicy/total/logp_diff_max",
    "lag": "offpolicy/rollout/version_lag_max",
    "crossing": "offpolicy/rollout/cross_version_fraction",
    "agreement": "offpolicy/rollout/sync_agreement",
}


at_sync: list[list[int]] = []
"""At each sync of adapters, the versions that requests in flight were sampled with."""


class NotedAdapters(ServerAdapters):
    """Notes what is in flight when the adapters of old versions are unloaded."""

    def unload_all_but(self, version: int | None) -> list[str]:
        """As in the class above."""
        at_sync.append(sorted(() if self.in_use is None else self.in_use()))
        return super().unload_all_but(version)


def main() -> None:
    """Train and print what was logged and recorded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--transfer", default="folder")
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--partial")
    parser.add_argument("--preset", help="in place of --lag, --partial, --old-logps and --transfer")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--old-logps", default="recompute_proximal")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--tools", action="store_true")
    parser.add_argument("--one-prompt", action="store_true")  # every row asks the same, so that both ranks do
    options = parser.parse_args()
    engine.ServerAdapters = NotedAdapters  # type: ignore[misc]
    fsdp2 = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if fsdp2:
        allow_fsdp2_on_cpu()
    ahead = {"lag": options.lag, "partial": options.partial, "old_logps": options.old_logps}
    saving = {"save_strategy": "steps", "save_steps": options.save} if options.save else {"save_strategy": "no"}
    args = OffPolicyGRPOConfig(
        output_dir=str(options.folder / "run"),
        use_cpu=True,
        accelerator_config={"use_configured_state": fsdp2},
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=options.url,
        engine={"retries": 1, "timeout": 60.0, **({} if options.preset else {"transfer": options.transfer})},
        async_rollouts=None if options.preset else ahead,
        generation_kwargs={"ignore_eos": True, **(SHORT_TURNS if options.tools else {})},
        check_token_ids="raise",
        offpolicy=options.preset or "paper/tis",
        learning_rate=0.003,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=options.length,
        logging_steps=1,
        write_report=False,
        control=None,
        **saving,
    )
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if options.lora else None
    rows = Dataset.from_list(conversations(32)) if options.tools else tiny_prompts()
    rows = Dataset.from_list([{"prompt": "w1 w2"}] * 32) if options.one_prompt else rows
    agents = {"tools": [lookup], "processing_class": tool_tokenizer()} if options.tools else {}
    reward = count_letters if options.tools else spread
    trainer = OffPolicyGRPOTrainer(options.model, reward, args, train_dataset=rows, peft_config=lora, **agents)
    trainer.train(resume_from_checkpoint=options.resume or None)
    if not trainer.accelerator.is_main_process:
        return
    run = options.folder / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    frame = pd.read_parquet(run / "rollouts.parquet").sort_values("step", kind="stable")
    print(
        json.dumps(
            {name: [row[key] for row in rows if key in row] for name, key in KEYS.items()}
            | {
                "prompts": [sorted(set(part.prompt)) for _, part in frame.groupby("step")],
                "lags": [
                    sorted({step - int(v) for versions in part.policy_versions for v in versions})
                    for step, part in frame.groupby("step")
                ],
                "called": [np.mean([not m.all() for m in part.completion_mask]) for _, part in frame.groupby("step")],
                "turns": max(map(turns, frame.completion_mask)),
                "distinct": [
                    [len(set(map(tuple, part.completion_ids))), len(part)]
                    for _, part in frame.groupby(["step", "prompt"])
                ],
                "in_order": all((versions[1:] >= versions[:-1]).all() for versions in frame.policy_versions),
                "at_sync": at_sync,
                "processes": trainer.accelerator.num_processes,
                "sharded": is_sharded(trainer.model),
            },
            default=float,
        )
    )


if __name__ == "__main__":
    main()
