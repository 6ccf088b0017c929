"""Test causes with the model on the cases that run.py made: the path "probe". Resumable.

python benchmarks/faults/explain.py --split tune --out runs/faults
"""

from __future__ import annotations

import argparse
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import contexts
import torch
from cases import TESTED_FOLDER, Case, load_cases
from kinds import kind_of
from rich.progress import track
from run import SEEDS
from sources import MODEL, Sources, prompts_at_hand, weights_at_hand
from worlds import World

from trl_offpolicy.diagnosis.attribution.attribute import attribute
from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence
from trl_offpolicy.diagnosis.attribution.hypotheses import Bench, run_hypotheses
from trl_offpolicy.diagnosis.attribution.trials.spellings import spellings_of
from trl_offpolicy.engines.hf import Head

ROWS = 4
"""Completions scored under each hypothesis."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--split", choices=SEEDS, default="report")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    parser.add_argument("--worlds", nargs="+", help="only these")
    parser.add_argument("--kinds", nargs="+", help="only these")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    folder = args.out / args.split
    benches = Benches(args.out, args.model)
    chosen = [case for case in load_cases(folder) if (args.worlds is None or case.world in args.worlds)
              and (args.kinds is None or case.kind in args.kinds)]  # fmt: skip
    for case in track([one for one in chosen if needs_testing(one, folder)], description="testing causes"):
        case.save_tested(folder, benches.test(case).tested)


def needs_testing(case: Case, folder: Path) -> bool:
    """Not tested yet, and a mismatch above the floor or a fault that log-probs hide."""
    if (folder / TESTED_FOLDER / f"{case.name}.npz").exists():
        return False
    return kind_of(case.kind).hidden or attribute(case.evidence).cause != "none"


class Benches:
    """What an investigator has at hand for each case: the model, versions, adapters, ways to render a prompt.

    Args:
        out: folder of run.py.
        model: path of SmolLM2.
    """

    def __init__(self, out: Path, model: str = MODEL) -> None:
        self._sources = Sources(out / "models", model)
        self._world: World | None = None
        self._at: tuple[str, int] | None = None

    def test(self, case: Case) -> TokenEvidence:
        """The case's evidence with the log-probs under hypotheses."""
        bench = self.of(case)
        with self.trainer(case):
            return run_hypotheses(case.evidence, bench)

    def of(self, case: Case) -> Bench:
        """The model with the trainer's weights, the prompts as they were meant, and what can be changed."""
        world = self._of(case)
        mask = case.evidence.completion_mask
        assert case.evidence.token_ids is not None
        ids = [row[: keep.sum()].tolist() for row, keep in zip(case.evidence.token_ids, mask, strict=True)]
        said = case.evidence.trainer
        head = Head(1.0 if said is None else said.temperature or 1.0)
        return Bench(
            world.model, case.prompt_ids, ids, weights=weights_at_hand(world),
            prompts=prompts_at_hand(world, case.prompt_ids), rows=ROWS, head=head, stop_ids=world.stop, pad_ids=(0,),
            spellings=None if world.task is None else spellings_of(world.task.tokenizer),
        )  # fmt: skip

    def trainer(self, case: Case) -> AbstractContextManager[Any]:
        """The context in which the model computes as the trainer says it does."""
        said = case.evidence.trainer.dtype if case.evidence.trainer else None
        if said in (None, "float32"):
            return nullcontext()
        return contexts.cast(self._of(case).model, getattr(torch, said))

    def _of(self, case: Case) -> World:
        return self.world(case.world, case.seed)

    def world(self, name: str, seed: int) -> World:
        """The model of a world with the prompts of a seed; the last one is kept."""
        if self._at != (name, seed):
            self._world, self._at = self._sources.world(name, seed), (name, seed)
        assert self._world is not None
        return self._world


if __name__ == "__main__":
    main()
