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
TESTED_FOLDER = "tested"
"""Subfolder for the log-probs under hypotheses: they belong to a version of the attribution, the cases do not."""


@dataclass(frozen=True)
class Case:
    """A fault that was injected, and what came of it.

    Args:
        name: unique in a run.
        world: model that played both sides, e.g. "smollm2".
        seed: of prompts and sampling.
        kind: name of the kind of fault in ``kinds.KINDS``; one that begins with "clean" is none.
        fault: what was done, in words.
        evidence: what can be seen.
        prompt_ids: (B,) prompts as they were meant.
    """

    name: str
    world: str
    seed: int
    kind: str
    fault: str
    evidence: TokenEvidence
    prompt_ids: list[list[int]]

    def save(self, folder: Path) -> None:
        """Write one file; whole or not at all."""
        arrays = {name: getattr(self.evidence, name) for name in _ARRAYS}
        arrays = {name: value for name, value in arrays.items() if value is not None}
        about: dict[str, Any] = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name != "evidence"
        }
        for side in ("engine", "trainer"):
            declared = getattr(self.evidence, side)
            about[side] = None if declared is None else asdict(declared)
        _write(folder / f"{self.name}.npz", about=np.array(json.dumps(about)), **arrays)

    def save_tested(self, folder: Path, tested: Mapping[str, Any]) -> None:
        """Write the log-probs under hypotheses into their subfolder."""
        (folder / TESTED_FOLDER).mkdir(exist_ok=True)
        _write(folder / TESTED_FOLDER / f"{self.name}.npz", **tested)

    def with_tested(self, tested: Mapping[str, Any]) -> Case:
        """The same case with log-probs under hypotheses."""
        return replace(self, evidence=replace(self.evidence, tested=dict(tested)))


def rescored_file(folder: Path, name: str) -> Path:
    """The answer of ``doctor --model``: it belongs to a version of the attribution, too."""
    return folder / TESTED_FOLDER / f"{name}.doctor.json"


def _write(path: Path, **arrays: Any) -> None:
    part = path.with_suffix(".part.npz")
    np.savez_compressed(part, **arrays)
    part.rename(path)


def load_case(path: Path) -> Case:
    """Read what :meth:`Case.save` and :meth:`Case.save_tested` wrote."""
    with np.load(path) as file:
        about = json.loads(str(file["about"]))
        arrays = {name: file[name] for name in file.files if name in _ARRAYS}
    known = {item.name for item in fields(Declared)}
    sides = {}
    for side in ("engine", "trainer"):
        given = about.pop(side)
        sides[side] = None if given is None else Declared(**{k: v for k, v in given.items() if k in known})
    case = Case(**about, evidence=TokenEvidence(**arrays, **sides))
    tested = path.parent / TESTED_FOLDER / path.name
    if not tested.exists():
        return case
    with np.load(tested) as file:
        return case.with_tested({name: file[name] for name in file.files})


def load_cases(folder: Path) -> list[Case]:
    """All finished cases of a folder, by name."""
    return [load_case(path) for path in sorted(folder.glob("*.npz")) if not path.name.endswith(".part.npz")]
