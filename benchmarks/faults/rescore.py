"""What ``doctor RUN --model`` says of the cases that run.py made: the path "doctor --model". Resumable.

python benchmarks/faults/rescore.py --split report --out runs/faults

A batch is taken for the recorded rows of a checkpoint. Of a recorded run the weights of three steps are at hand
(:data:`CHECKPOINTS`).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import Case, load_cases, rescored_file
from explain import ROWS, Benches
from rich.progress import track
from run import SEEDS
from sources import MODEL, WORLDS
from time_faults import STEPS, version_at
from worlds import World

from trl_offpolicy.diagnosis.attribution.attribute import Attribution
from trl_offpolicy.diagnosis.attribution.bench import Bench
from trl_offpolicy.diagnosis.attribution.trials.spellings import spellings_of
from trl_offpolicy.diagnosis.rescoring.rescore import Recorded, attribute_rescored, attribute_run_rescored
from trl_offpolicy.run_folder.layout import RUN_FILE
from trl_offpolicy.run_folder.rollouts import read_rollouts

CHECKPOINTS = (0, STEPS // 2, STEPS - 1)
"""Steps of a run whose weights were saved."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--split", choices=SEEDS, default="report")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    parser.add_argument("--worlds", nargs="+", default=WORLDS, help="only these")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    folder, benches = args.out / args.split, Benches(args.out, args.model)
    todo: list[tuple[str, Any]] = [
        (case.name, partial(of_case, case, benches)) for case in load_cases(folder) if case.world in args.worlds
    ]
    for run in sorted(folder.glob("*.run")):
        if run.name.split("-")[0] in args.worlds:
            todo.append((run.stem, partial(of_run, run, benches)))
    for name, answer in track([one for one in todo if not rescored_file(folder, one[0]).exists()], "scoring again"):
        found = answer()
        file = rescored_file(folder, name)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"cause": found.cause, "confidence": float(found.confidence)}))


def of_case(case: Case, benches: Benches) -> Attribution:
    """The answer for a batch: what was recorded of it, and the model with the trainer's weights."""
    recorded = replace(case.evidence.at_level("logps+config"), rescored_per_token_logps=None, tested={})
    bench = benches.of(case)
    with benches.trainer(case):
        return attribute_rescored(recorded, bench)


def of_run(folder: Path, benches: Benches) -> Attribution:
    """The answer for a recorded run."""
    info = json.loads((folder / RUN_FILE).read_text())
    world = benches.world(info["case"]["world"], info["case"]["seed"])
    rollouts = read_rollouts(folder)
    assert rollouts is not None
    found, _ = attribute_run_rescored(rollouts, info, {step: partial(opened, world, step) for step in CHECKPOINTS})
    assert found is not None
    return found


@contextmanager
def opened(world: World, step: int, recorded: Recorded) -> Iterator[Bench]:
    """The model with the weights of a checkpoint; the engine may hold those of the other ones."""

    def holding(other: int) -> Any:
        return lambda: world.weights.at(version_at(world, other))

    weights = {f"stale_weights:those of step {other}": holding(other) for other in CHECKPOINTS if other != step}
    with world.weights.at(version_at(world, step)):
        yield Bench(
            world.model, recorded.prompt_ids, recorded.completion_ids, weights=weights, rows=ROWS, head=recorded.head,
            stop_ids=world.stop, pad_ids=(0,),
            spellings=None if world.task is None else spellings_of(world.task.tokenizer),
        )  # fmt: skip


if __name__ == "__main__":
    main()
