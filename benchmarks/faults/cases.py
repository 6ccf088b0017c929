"""One case: a batch that a faulty engine sampled, or that a faulty trainer scored, with what is known about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from trl_offpolicy.diagnosis.attribution.evidence import Declared, TokenEvidence

_ARRAYS = [
    item.name for item in fields(TokenEvidence) if item.name not in ("engine", "trainer", "tested", "seen", "compared")
]


@dataclass(frozen=True)
class Case:
    """A fault that was injected, and what came of it.

    Args:
        name: unique in a run.
        world: model and engine, e.g. "smollm2-hf".
        seed: of prompts and sampling.
        cause: the injected one; "none" = clean; "unknown" = a fault that is not in the table of causes.
        fault: what was done, in words.
        strength: rank of the fault's size, 0 = smallest.
        evidence: what can be seen.
        prompt_ids: (B,) prompts as the trainer saw them.
    """

    name: str
    world: str
    seed: int
    cause: str
    fault: str
    strength: int
    evidence: TokenEvidence
    prompt_ids: list[list[int]]

    def save(self, folder: Path) -> None:
        """Write one file; whole or not at all."""
        arrays = {name: getattr(self.evidence, name) for name in _ARRAYS}
        arrays = {name: value for name, value in arrays.items() if value is not None}
        arrays |= {f"tested/{name}": value for name, value in self.evidence.tested.items()}
        about: dict[str, Any] = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name != "evidence"
        }
        for side in ("engine", "trainer"):
            declared = getattr(self.evidence, side)
            about[side] = None if declared is None else asdict(declared)
        part = folder / f"{self.name}.part.npz"
        np.savez_compressed(part, about=np.array(json.dumps(about)), **arrays)
        part.rename(folder / f"{self.name}.npz")

    def with_tested(self, tested: Mapping[str, Any]) -> Case:
        """The same case with log-probs under hypotheses."""
        return replace(self, evidence=replace(self.evidence, tested=dict(tested)))


def load_case(path: Path) -> Case:
    """Read what :meth:`Case.save` wrote."""
    with np.load(path) as file:
        about = json.loads(str(file["about"]))
        arrays = {name: file[name] for name in file.files if name in _ARRAYS}
        tested = {name.removeprefix("tested/"): file[name] for name in file.files if name.startswith("tested/")}
    sides = {side: None if (given := about.pop(side)) is None else Declared(**given) for side in ("engine", "trainer")}
    return Case(**about, evidence=TokenEvidence(**arrays, **sides, tested=tested))


def load_cases(folder: Path) -> list[Case]:
    """All finished cases of a folder, by name."""
    return [load_case(path) for path in sorted(folder.glob("*.npz")) if not path.name.endswith(".part.npz")]
