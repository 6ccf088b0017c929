"""Train under Lightning with a replay buffer and a real vLLM server; prints one JSON line.

    python tests/lightning/replay_run.py FOLDER URL --model M --buffer GROUPS [--wide] [--beta B] [--length L]

The options and the line are those of ``tests/engines/combined_run.py``. Each batch is computed again before its loss.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.extend(map(str, Path(__file__).resolve().parents[:2]))
from engines.combined_run import SHOWN, WIDE
from kept_run import noted
from lightning_runs import Watch, data, module, trainer
from tiny_models import spread


def main() -> None:
    """Train and print what was logged beside what was computed again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--buffer", type=int, required=True)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--length", type=int, default=8)
    options = parser.parse_args()
    kl = {"objective": {"kl": {"coef": options.beta}}} if options.beta else {}
    ours = module(
        {"type": "server", "base_url": options.url, "patience": {"timeout": 300.0, "retries": 1}},
        model=options.model,
        tokenizer=None,
        reward_funcs=spread,
        correction=WIDE if options.wide else "paper/tis",
        replay={"groups": options.buffer, "max_rows": 1000},
        optimizer=partial(torch.optim.AdamW, lr=0.003),
        sampling={"max_tokens": options.length, "extra": {"ignore_eos": True}},
        sync_check=True,
        control="off",
        **kl,
    )
    computed, watch = noted(ours, options.model, per_generation=1), Watch()
    trainer(options.folder, callbacks=[watch], max_steps=4).fit(ours, data(micro_batch_size=8))
    logged = [{name: row.get(key) for name, key in SHOWN.items()} for row in watch.logs]
    for row, seen, loss in zip(logged, watch.logs, watch.losses, strict=True):
        row |= {"loss": loss, "kl": seen.get("offpolicy/loss/kl")}
    print(json.dumps({"logged": logged, "computed": computed}, default=float))


if __name__ == "__main__":
    main()
