"""Train a tiny model for three steps under Lightning with a real vLLM engine in this process; prints one JSON line.

    python tests/lightning/vllm_run.py FOLDER [--lora] [--no-sync] [--rounding int8] [--tools] [--launcher]
    ... [--preset '"paper/qarl"']                                 # a preset, or its mapping as JSON
    ... [--server URL --model FOLDER --transfer T] [--devices 2]  # with a server in place of the engine here

A process of its own: an engine cannot be built twice in one. ``--no-sync`` leaves the engine at its first weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from agent_runs import lookup, tool_tokenizer
from lightning_runs import Watch, data, module, trainer
from tiny_models import DRAFTS, EOS, VOCABULARY, save_tiny_model, spread, tiny_prompts
from transformers import GenerationConfig

from lightning_module import engines
from trl_offpolicy.engines.engine import SyncError, SyncReport
from trl_offpolicy.engines.environment import EXTERNAL_LAUNCHER


def agent_settings(model: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Settings of an agent whose turns are a few tokens long, and its prompts."""
    ends = [EOS, *range(EOS + 2, len(VOCABULARY), 2)]
    GenerationConfig(eos_token_id=ends).save_pretrained(model)
    prompts = [{"prompt": [{"role": "user", "content": f"w{i} w{i + 1}"}]} for i in range(8)]
    return {"tokenizer": tool_tokenizer(), "tools": [lookup], "check_token_ids": "raise"}, prompts


def spread_of_turns(completions: Any, **_: Any) -> list[float]:
    """A reward that differs within every group."""
    return spread([str(one) for one in completions])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--no-sync", action="store_true")
    parser.add_argument("--rounding")
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--preset", type=yaml.safe_load, default="paper/tis")
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--tools", action="store_true")
    parser.add_argument("--launcher", action="store_true", help="vLLM's executor as on a GPU")
    parser.add_argument("--server")
    parser.add_argument("--model")
    parser.add_argument("--transfer", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    return parser.parse_args()


def stay(self: Any, version: int) -> SyncReport:
    """In place of a sync: nothing is sent."""
    self.version = version
    return SyncReport(version=version, kind="memory", bytes=0, seconds=0.0)


def main() -> None:
    options = parse()
    if options.no_sync:
        engines.ColocateEngine.sync_weights = stay  # type: ignore[method-assign, attr-defined]
    engine = {"type": "vllm", "max_model_len": 64, "seed": 3, "weight_rounding": options.rounding}
    engine |= {"exact": True} if options.exact else {}
    engine |= {"norm_noise": {"start": 0.3, "end": 0.1, "stages": 3}} if options.noise else {}
    engine |= {"speculative_config": DRAFTS} if options.drafts else {}
    engine |= {"distributed_executor_backend": EXTERNAL_LAUNCHER} if options.launcher else {}
    if options.server:
        engine = {"type": "server", "base_url": options.server, "patience": {"timeout": 60.0, "retries": 1}}
        engine["transfer"] = options.transfer
    model = options.model or str(save_tiny_model(options.folder / "model"))
    agent, prompts = agent_settings(model) if options.tools else ({"tokenizer": None}, None)
    ours = module(
        engine,
        model=model,
        reward_funcs=spread_of_turns if options.tools else spread,
        correction=options.preset,
        optimizer=partial(torch.optim.SGD, lr=5.0) if options.lora else partial(torch.optim.AdamW, lr=0.01),
        adapter={"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]} if options.lora else None,
        sync_check=True,
        sampling={"max_tokens": 24 if options.tools else 8},
        **agent,
    )
    watch = Watch()
    held_out = {"val_dataset": tiny_prompts(2) if prompts is None else prompts[:2], "val_batch_size": 2}
    ranks = {"devices": options.devices, "strategy": "ddp"} if options.devices > 1 else {}
    owner = trainer(
        options.folder, callbacks=[watch], max_steps=3, val_check_interval=3, num_sanity_val_steps=1, **ranks
    )
    stopped = ""
    try:
        owner.fit(ours, data(prompts, micro_batch_size=8, **held_out))
    except SyncError as error:
        stopped = str(error)
    if not owner.is_global_zero:
        return
    logs = watch.logs
    print(
        json.dumps(
            {
                "mismatch": [row["offpolicy/mismatch/logp_diff_max"] for row in logs],
                "agreement": [row.get("offpolicy/rollout/sync_agreement") for row in logs],
                "bytes": [row.get("offpolicy/rollout/sync_bytes") for row in logs],
                "taken": [row.get("offpolicy/rollout/draft_taken_fraction") for row in logs],
                "noise": [row.get("offpolicy/rollout/norm_noise") for row in logs],
                "moved": [row["grad_norm"] for row in logs],
                "eval_reward": float(owner.callback_metrics.get("eval_reward", torch.nan)),
                "calls": [row.get("tools/call_frequency") for row in logs],
                "after_tools": [row.get("offpolicy/post_tool/token_fraction") for row in logs],
                "not_sampled": [row["offpolicy/rollout/retokenised_fraction"] for row in logs],
                "ranks": owner.world_size,
                "stopped": stopped,
                "exact": None if ours.exact.found is None else ours.exact.found.as_dict(),
                "trl": "trl" in sys.modules,
            }
        )
    )


if __name__ == "__main__":
    main()
