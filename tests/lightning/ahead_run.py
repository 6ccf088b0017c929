"""Train a tiny model under Lightning ahead of a real vLLM server; prints one JSON line.

python tests/lightning/ahead_run.py FOLDER URL --model M [--lag K] [--old-logps O] [--length L] [--lora] [--devices 2]
... [--transfer T]  # of the weights
... [--save N]      # a checkpoint at step N
... [--resume N]    # from there
... [--tools]       # episodes of several turns, which call a tool
... [--one-prompt]  # every row asks the same, so that both ranks do
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from agent_runs import SHORT_TURNS, conversations, count_letters, lookup, tool_tokenizer, turns
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_runs import Watch, data, module, trainer
from rollouts.ahead.ahead_run import KEYS
from tiny_models import spread

from lightning_module import RunFolder


def main() -> None:
    """Train and print what was logged and recorded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--old-logps", default="recompute_proximal")
    parser.add_argument("--partial")
    parser.add_argument("--preset", help="in place of --lag, --partial and --old-logps")
    parser.add_argument("--transfer", choices=["folder", "broadcast", "adapter"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--save", type=int)
    parser.add_argument("--resume", type=int)
    parser.add_argument("--tools", action="store_true")
    parser.add_argument("--one-prompt", action="store_true")
    options = parser.parse_args()
    ahead = {"lag": options.lag, "old_logps": options.old_logps, "partial": options.partial}
    transfer = {} if options.transfer is None else {"transfer": options.transfer}
    ours = module(
        {"type": "server", "base_url": options.url, "patience": {"timeout": 60.0, "retries": 1}, **transfer},
        model=options.model,
        tokenizer=tool_tokenizer() if options.tools else None,
        tools=[lookup] if options.tools else None,
        reward_funcs=count_letters if options.tools else spread,
        check_token_ids="raise",
        correction=options.preset or "paper/tis",
        async_rollouts=None if options.preset else ahead,
        adapter={"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]} if options.lora else None,
        optimizer=partial(torch.optim.SGD, lr=5.0) if options.lora else partial(torch.optim.AdamW, lr=0.003),
        sampling={
            "max_tokens": options.length,
            "extra": {"ignore_eos": True, **(SHORT_TURNS if options.tools else {})},
        },
        sync_check=True,
        control="off",
    )
    run, watch = options.folder / "run", Watch()
    saver = ModelCheckpoint(dirpath=options.folder, every_n_train_steps=options.save, save_top_k=-1, filename="{step}")
    saving = {"enable_checkpointing": True} if options.save else {}
    ranks = {"devices": options.devices, "strategy": "ddp"} if options.devices > 1 else {}
    callbacks = [watch, RunFolder(str(run), report=False), *([saver] if options.save else [])]
    owner = trainer(options.folder, callbacks=callbacks, max_steps=options.steps, **ranks, **saving)
    path = options.folder / f"step={options.resume}.ckpt" if options.resume else None
    rows = conversations(32) if options.tools else [{"prompt": "w1 w2"}] * 32 if options.one_prompt else None
    owner.fit(ours, data(rows, micro_batch_size=8), ckpt_path=path, weights_only=True if path else None)
    if not owner.is_global_zero:
        return
    frame = pd.read_parquet(run / "rollouts.parquet").sort_values("step", kind="stable")
    print(
        json.dumps(
            {name: [row[key] for row in watch.logs if key in row] for name, key in KEYS.items()}
            | {
                "bytes": [row["offpolicy/rollout/sync_bytes"] for row in watch.logs],
                "prompts": [sorted(set(part.prompt)) for _, part in frame.groupby("step")],
                "lags": [
                    sorted({step - int(v) for versions in part.policy_versions for v in versions})
                    for step, part in frame.groupby("step")
                ],
                "called": [
                    float(np.mean([not m.all() for m in part.completion_mask])) for _, part in frame.groupby("step")
                ],
                "turns": max(map(turns, frame.completion_mask)),
                "distinct": [
                    [len(set(map(tuple, part.completion_ids))), len(part)]
                    for _, part in frame.groupby(["step", "prompt"])
                ],
                "in_order": all((versions[1:] >= versions[:-1]).all() for versions in frame.policy_versions),
                "processes": owner.world_size,
            },
            default=int,
        )
    )


if __name__ == "__main__":
    main()
