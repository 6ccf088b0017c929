"""Train with TRL on a real vLLM server under several options at once; prints one JSON line.

    python tests/engines/combined_run.py FOLDER URL --model M [--replay r3] [--transfer T] [--top-p P]
        [--ahead OLD_LOGPS] [--lag K] [--partial P] [--buffer GROUPS] [--beta B] [--steps N] [--length L]

Before each loss the batch is computed again in another way (``again.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engines.again import DECAY, Again
from tiny_models import spread, tiny_prompts

from trl_offpolicy.rollouts.replay import ReplayBuffer
from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.replay import ReplayGRPOTrainer
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

SHOWN = {
    "mismatch": "offpolicy/mismatch/logp_diff_max", "staleness": "offpolicy/staleness/logp_diff_mean",
    "total": "offpolicy/total/logp_diff_mean", "lag": "offpolicy/rollout/version_lag_max",
    "crossing": "offpolicy/rollout/cross_version_fraction", "routing": "offpolicy/routing/agreement",
    "kept": "offpolicy/rollout/kept_ids_mean", "by_rule": "offpolicy/rollout/recomputed_cut_fraction",
    "outside": "offpolicy/rollout/outside_fraction", "kl": "kl",
}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--replay", default="none")
    parser.add_argument("--transfer", default="folder")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--ahead")
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--partial", default="finish")
    parser.add_argument("--buffer", type=int, default=0)
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=0.003)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--length", type=int, default=8)
    return parser.parse_args()


def main() -> None:
    """Train and print what was logged beside what was computed again."""
    options = parse()
    per_generation = 1 if options.ahead or options.buffer else 2
    ahead = {"lag": options.lag, "partial": options.partial, "old_logps": options.ahead}
    ahead |= {"ewma_decay": DECAY} if options.ahead == "ewma" else {}
    args = OffPolicyGRPOConfig(
        output_dir=str(options.folder / "run"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=options.url,
        engine={"transfer": options.transfer, "retries": 1, "timeout": 300.0},
        async_rollouts=ahead if options.ahead else None,
        routing_replay=options.replay,
        top_p=options.top_p,
        beta=options.beta,
        generation_kwargs={"ignore_eos": True},
        offpolicy="paper/tis",
        learning_rate=options.rate,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        steps_per_generation=per_generation,
        num_generations=4,
        max_completion_length=options.length,
        logging_steps=1,
        save_strategy="no",
        write_report=False,
        noise_floor_steps=0,
        disable_tqdm=True,
        control=None,
    )
    kind, more = OffPolicyGRPOTrainer, {}
    if options.buffer:
        buffer = ReplayBuffer(options.folder / "buffer", max_rows=1000)
        kind, more = ReplayGRPOTrainer, {"replay": buffer, "replay_groups": options.buffer}
    trainer = kind(options.model, spread, args, train_dataset=tiny_prompts(), **more)
    again, computed, original = Again(options.model, per_generation), [], trainer._compute_loss

    def noted(model: Any, inputs: dict[str, Any]) -> Any:
        step = trainer.state.global_step
        computed.append(again(inputs, step, trainer.accelerator.unwrap_model(model)))
        return original(model, inputs)

    trainer._compute_loss = noted
    trainer.train()
    lines = (options.folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    logged = [{name: row.get(key) for name, key in SHOWN.items()} for row in rows]
    print(json.dumps({"logged": logged, "computed": computed}))


if __name__ == "__main__":
    main()
