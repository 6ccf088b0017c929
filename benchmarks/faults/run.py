"""Inject every fault into a real model and save what engine and trainer then say: one file a case, resumable.

python benchmarks/faults/run.py --split report --out runs/faults
python benchmarks/faults/score.py runs/faults
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from faults import Thunk, adapter_faults, cached_clean, routing_faults, shared_faults, trainer_faults
from moe import EXPERTS, VOCABULARY, tiny_moe
from policies import Policy, train_other, train_versions
from rich.progress import track
from tasks import Task
from worlds import PROMPTS, World

MODEL = ".cache/SmolLM2-135M-Instruct"
SPLITS = {"tune": ((0, 1), range(10, 14)), "report": ((100, 101), range(110, 130))}
"""Seeds with all faults, and seeds that are only run clean. Prompts, samples and adapters differ between splits."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--split", choices=SPLITS, default="report")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    parser.add_argument("--seeds", type=int, nargs="+", help="only these")
    parser.add_argument("--worlds", nargs="+", default=["smollm2-hf", "moe-hf"])
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    folder = args.out / args.split
    (folder / "done").mkdir(parents=True, exist_ok=True)
    for world in args.worlds:
        for seed, thunks in SOURCES[world](args, folder):
            if args.seeds is None or seed in args.seeds:
                run_seed(world, seed, thunks, folder)


def run_seed(world: str, seed: int, thunks: list[Thunk], folder: Path) -> None:
    """Make the cases of one seed that are not there yet; a marker says what is finished, and its seconds."""
    for name, make in track(thunks, description=f"{world} seed {seed}"):
        marker = folder / "done" / f"{world}-{seed}-{name}.json".replace(" ", "_").replace("/", "_")
        if marker.exists():
            continue
        start = time.monotonic()
        torch.manual_seed(seed)  # of dropout
        cases = make()
        for case in cases:
            case.save(folder)
        marker.write_text(json.dumps({"cases": [c.name for c in cases], "seconds": time.monotonic() - start}))


def smollm2(args: Any, folder: Path) -> Iterator[tuple[int, list[Thunk]]]:
    """The quickstart's model with the last version of a LoRA adapter that GRPO steps made."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    task, stop = Task(tokenizer), [tokenizer.eos_token_id]
    versions, other = updates(args, folder, task, stop)
    policy = Policy(args.model)
    policy.set_weights(versions[-1])
    faulty, clean_only = SPLITS[args.split]
    for seed in (*faulty, *clean_only):
        rows = task.rows(PROMPTS, seed=seed)
        declared = {"adapter": "policy", "weight_version": len(versions)}
        world = World("smollm2-hf", seed, policy.model, [row.prompt_ids for row in rows], stop, declared)
        clean = cached_clean(world)
        thunks = list(shared_faults(world, clean))
        if seed in clean_only:
            yield seed, thunks[:1]
            continue
        thunks += adapter_faults(world, policy, versions, other, clean)
        questions = [row.question for row in rows]
        thunks += trainer_faults(world, policy, task, questions, versions[-1], clean)
        yield seed, thunks


def updates(args: Any, folder: Path, task: Task, stop: list[int]) -> tuple[list[Any], Any]:
    """Real updates of the model, trained once a split."""
    path = folder / "updates.pt"
    if not path.exists():
        seed = SPLITS[args.split][0][0]
        start = time.monotonic()
        torch.save(
            (train_versions(args.model, task, seed=seed, stop=stop), train_other(args.model, task, seed=seed)), path
        )
        print(f"trained the adapters in {time.monotonic() - start:.0f} s")
    versions, other = torch.load(path)
    return versions, other


def moe(args: Any, folder: Path) -> Iterator[tuple[int, list[Thunk]]]:
    """A tiny mixture of experts."""
    faulty, clean_only = SPLITS[args.split]
    for seed in (*faulty, *clean_only):
        generator = torch.Generator().manual_seed(seed)
        prompts = [torch.randint(2, VOCABULARY, (12,), generator=generator).tolist() for _ in range(PROMPTS)]
        world = World("moe-hf", seed, tiny_moe(seed), prompts, [1], {"experts": EXPERTS, "weight_version": 0})
        thunks = list(shared_faults(world, cached_clean(world)))
        yield seed, thunks[:1] if seed in clean_only else [*thunks, ("routing", partial(routing_faults, world))]


SOURCES = {"smollm2-hf": smollm2, "moe-hf": moe}


if __name__ == "__main__":
    main()
