"""Inject every kind of fault into real models and save what engine and trainer then say: one file a case, resumable.

python benchmarks/faults/run.py --split tune --out runs/faults      # while the attribution changes
python benchmarks/faults/run.py --split report --out runs/faults    # read once, at the end
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import torch
from kind import Kind, Split
from kinds import CLEANS, KINDS
from rich.progress import track
from sources import MODEL, WORLDS, Sources
from time_faults import fp8_grid, record
from wall import SEEN_CLEAN
from worlds import World

SEEDS: dict[Split, int] = {"tune": 0, "report": 200}
"""Seed of the prompts and samples of the faults. Seed 100 was that of the first report, whose kinds are now "tune"."""
NEW_CLEAN = [name for name in CLEANS if name not in SEEN_CLEAN]
CLEAN_SEEDS: dict[Split, dict[str, dict[str, int]]] = {
    "tune": {
        "smollm2": {"clean": 1},
        "qwen": dict.fromkeys(SEEN_CLEAN, 1),
        "moe": dict.fromkeys(SEEN_CLEAN, 1),
    },
    "report": {
        "smollm2": dict.fromkeys(NEW_CLEAN, 1) | {"clean": 1, "clean_bf16_on_both_sides": 1},
        "qwen": dict.fromkeys(NEW_CLEAN, 2) | {"clean": 2, "clean_bf16_on_both_sides": 2, "clean_compiled": 1,
                                               "clean_fp16_on_both_sides": 2, "clean_one_at_a_time": 1},
        "moe": dict.fromkeys(NEW_CLEAN, 2) | {"clean": 3, "clean_one_at_a_time": 1, "clean_batches_of_five": 1,
                                              "clean_chunked_prefill": 1, "clean_left_padding": 1},
    },
}  # fmt: skip
"""How many seeds of each clean variant a world runs; one that a world does not have is left out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--split", choices=SEEDS, default="report")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=WORLDS)
    parser.add_argument("--kinds", nargs="+", help="only these")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    folder = args.out / args.split
    (folder / "done").mkdir(parents=True, exist_ok=True)
    sources = Sources(args.out / "models", args.model)
    for name in args.worlds:
        for seed, kinds in plan(name, args.split):
            chosen = [kind for kind in kinds if args.kinds is None or kind.name in args.kinds]
            todo = [kind for kind in chosen if not marker_of(folder, name, seed, kind).exists()]
            if todo:
                make_cases(sources.world(name, seed), todo, folder)


def plan(world: str, split: Split) -> Iterator[tuple[int, list[Kind]]]:
    """The kinds of each seed that a world runs; the seeds of clean cases follow that of the faults.

    The order mixes the families, so that what is there before the end is a sample of all.
    """
    mine = [kind for kind in KINDS.values() if kind.split == split and world in kind.models]
    yield SEEDS[split], sorted(mine, key=lambda kind: crc32(kind.name.encode()))
    counts = {name: count for name, count in CLEAN_SEEDS[split][world].items() if world in CLEANS[name].models}
    for number in range(max(counts.values())):
        yield SEEDS[split] + 1 + number, [CLEANS[name] for name, count in counts.items() if number < count]


def marker_of(folder: Path, world: str, seed: int, kind: Kind) -> Path:
    """The file that says that a case is finished, and its seconds."""
    return folder / "done" / f"{world}-{seed:03d}-{kind.name}.json"


def make_cases(world: World, kinds: list[Kind], folder: Path) -> None:
    """Make the cases of one world and seed."""
    for kind in track(kinds, description=f"{world.name} seed {world.seed}"):
        start = time.monotonic()
        world.begin(kind.name)
        if kind.run is not None:
            record_run(world, kind, folder)
        else:
            assert kind.inject is not None
            world.case(kind.name, kind.inject(world)).save(folder)
        about = {"kind": kind.name, "seconds": round(time.monotonic() - start, 1)}
        marker_of(folder, world.name, world.seed, kind).write_text(json.dumps(about))


def record_run(world: World, kind: Kind, folder: Path) -> None:
    """The recorded run of a fault over time; one of them begins with weights that an fp8 engine holds exactly."""
    assert kind.run is not None
    if kind.name != "sub_ulp_syncs":
        return record(world, kind.name, kind.run, folder)
    weights = world.weights
    exact = weights.base
    weights.base = {name: fp8_grid(value) if value.dim() == 2 else value for name, value in exact.items()}
    try:
        with weights.at(0):
            record(world, kind.name, kind.run, folder)
    finally:
        weights.base = exact
        with weights.at(0):  # leaving it writes the last version on the exact base
            pass
    return None


if __name__ == "__main__":
    main()
