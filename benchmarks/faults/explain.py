"""Test causes with the model on the cases that run.py made: the level "logps+model". Resumable.

python benchmarks/faults/explain.py --split report --out runs/faults
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import Case, load_case
from moe import tiny_moe
from policies import Policy
from rich.progress import track
from run import MODEL
from tasks import Task
from worlds import PROMPTS

from trl_offpolicy.diagnosis.attribution.attribute import attribute
from trl_offpolicy.diagnosis.attribution.hypotheses import Bench, run_hypotheses

Inside = Callable[[], AbstractContextManager[Any]]
ROWS = 4
"""Completions scored under each hypothesis."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--split", default="report")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    parser.add_argument("--world", default="", help="only worlds whose name begins so")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    folder = args.out / args.split
    paths = sorted(path for path in folder.glob(f"{args.world}*.npz") if not path.name.endswith(".part.npz"))
    todo = [path for path in paths if needs_testing(load_case(path))]
    benches = Benches(args.model, folder)
    for path in track(todo, description="testing causes"):
        case = load_case(path)
        tested = run_hypotheses(case.evidence, benches.of(case)).tested
        case.with_tested(tested).save(folder)


def needs_testing(case: Case) -> bool:
    """A mismatch above the floor that has not been tested."""
    return not case.evidence.tested and attribute(case.evidence).cause != "none"


class Benches:
    """Models of the worlds, with what an investigator has at hand: versions, adapters, ways to render a prompt."""

    def __init__(self, model: str, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.task = Task(AutoTokenizer.from_pretrained(model))
        self._path, self._folder = model, folder
        self._policy: Policy | None = None
        self._versions: list[Any] = []
        self._other: Any = None

    def of(self, case: Case) -> Bench:
        mask = case.evidence.completion_mask
        assert case.evidence.token_ids is not None
        ids = [row[: keep.sum()].tolist() for row, keep in zip(case.evidence.token_ids, mask, strict=True)]
        if case.world.startswith("moe"):
            return Bench(tiny_moe(case.seed), case.prompt_ids, ids, rows=ROWS)
        policy = self._load()
        return Bench(
            policy.model, case.prompt_ids, ids, weights=self._weights(policy), prompts=self._prompts(case), rows=ROWS
        )

    def _load(self) -> Policy:
        if self._policy is None:
            self._policy = Policy(self._path)
            self._versions, self._other = torch.load(self._folder / "updates.pt")
            self._policy.set_weights(self._versions[-1])
        return self._policy

    def _weights(self, policy: Policy) -> dict[str, Inside]:
        last = len(self._versions)
        found = {
            f"stale_weights:version {number} of {last}": partial(self._holding, policy, self._versions[number - 1])
            for number in range(last - 1, 0, -1)
        }
        found["wrong_adapter:no adapter"] = partial(self._holding, policy, None)
        found["wrong_adapter:another adapter"] = partial(self._holding, policy, self._other)
        return found

    @contextmanager
    def _holding(self, policy: Policy, delta: Any) -> Iterator[None]:
        policy.set_weights(delta)
        try:
            yield
        finally:
            policy.set_weights(self._versions[-1])

    def _prompts(self, case: Case) -> dict[str, list[list[int]]]:
        questions = [row.question for row in self.task.rows(PROMPTS, seed=case.seed)]
        times = len(case.prompt_ids) // len(questions)
        ways: dict[str, dict[str, Any]] = {
            "no chat template": {"template": False},
            "no system prompt": {"system": None},
        }
        return {
            name: [self.task.render(question, **how) for question in questions for _ in range(times)]
            for name, how in ways.items()
        }


if __name__ == "__main__":
    main()
