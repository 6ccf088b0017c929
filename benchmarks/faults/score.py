"""Attribute every case that run.py made, and write confusion matrices and accuracy by strength.

python benchmarks/faults/score.py runs/faults --split report --out benchmarks/faults
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cases import Case, load_cases

from trl_offpolicy.diagnosis.attribution.attribute import attribute, coarse_of
from trl_offpolicy.diagnosis.attribution.evidence import LEVELS
from trl_offpolicy.diagnosis.attribution.signatures import Limits
from trl_offpolicy.diagnosis.thresholds import SAME_POLICY_KL

WITH_ENTROPY = "logps+entropy"
NAMES = ("logps", WITH_ENTROPY, "logps+config", "logps+model")
BANDS = ((0.0, 2.0, "below 2"), (2.0, 10.0, "2 to 10"), (10.0, 1e3, "10 to 1000"), (1e3, float("inf"), "above 1000"))
"""Strength: KL k3 over the noise floor."""
MARKER = "<!-- tables of score.py -->"
NOT_SCORED = ("precision and routing",)


@dataclass(frozen=True)
class Answer:
    """One case at one level."""

    case: str
    level: str
    truth: str
    cause: str
    ratio: float

    @property
    def coarse_right(self) -> bool:
        return coarse_of(self.truth) == coarse_of(self.cause)

    @property
    def right(self) -> bool:
        return self.truth == self.cause


def answers(cases: Sequence[Case], limits: Limits | None = None) -> list[Answer]:
    """All levels of all cases."""
    found = []
    for case in cases:
        for name in NAMES:
            if name == "logps+model" and not case.evidence.tested and case.cause != "none":
                continue
            level = name if name in LEVELS else "logps"
            evidence = case.evidence.at_level(level)  # type: ignore[arg-type]
            if name == "logps":
                evidence = replace(evidence, entropies=None)
            seen = attribute(evidence, limits)
            ratio = seen.features.k3 / SAME_POLICY_KL
            found.append(Answer(case.name, name, case.cause, seen.cause, ratio))
    return found


def summarize(found: Sequence[Answer]) -> dict[str, Any]:
    """Accuracy by level, strength and cause, and the confusion matrices; clean cases and ambiguous ones apart."""
    out: dict[str, Any] = {}
    for level in NAMES:
        mine = [a for a in found if a.level == level and a.truth not in NOT_SCORED]
        faults = [a for a in mine if a.truth != "none"]
        above = [a for a in faults if a.ratio > 2]
        clean = [a for a in mine if a.truth == "none"]
        confusion: dict[str, Counter[str]] = defaultdict(Counter)
        for a in above + clean:
            confusion[coarse_of(a.truth)][coarse_of(a.cause)] += 1
        out[level] = {
            "coarse": _share([a.coarse_right for a in above]),
            "exact": _share([a.right for a in above]),
            "unknown": _share([a.cause == "unknown" for a in above if a.truth != "unknown"]),
            "cases_above_twice_the_floor": len(above),
            "false_alarms": sum(a.cause != "none" for a in clean),
            "clean_cases": len(clean),
            "by_strength": {
                text: {"coarse": _share([a.coarse_right for a in faults if low < a.ratio <= high]),
                       "cases": sum(low < a.ratio <= high for a in faults)}
                for low, high, text in BANDS
            },
            "by_cause": {
                cause: {"coarse": _share([a.coarse_right for a in above if a.truth == cause]),
                        "exact": _share([a.right for a in above if a.truth == cause]),
                        "cases": sum(a.truth == cause for a in above)}
                for cause in sorted({a.truth for a in above})
            },
            "confusion": {truth: dict(row) for truth, row in sorted(confusion.items())},
        }  # fmt: skip
    return out


def markdown(result: dict[str, Any]) -> str:
    """Tables for the README: accuracy by level and strength, by cause, and the confusion matrices."""
    bands = [text for _, _, text in BANDS if text != "below 2"]
    lines = ["| observed | coarse | exact | 'unknown' | cases | " + " | ".join(f"{b} x floor" for b in bands)
             + " | false alarms |", "|---" * (6 + len(bands)) + "|"]  # fmt: skip
    for level, row in result.items():
        strength = [f"{_percent(row['by_strength'][b]['coarse'])} ({row['by_strength'][b]['cases']})" for b in bands]
        cells = [level, *(_percent(row[key]) for key in ("coarse", "exact", "unknown"))]
        cells += [str(row["cases_above_twice_the_floor"]), *strength, f"{row['false_alarms']} of {row['clean_cases']}"]
        lines.append("| " + " | ".join(cells) + " |")
    causes = sorted({cause for row in result.values() for cause in row["by_cause"]})
    lines += [
        "",
        "| injected (coarse / exact) | cases | " + " | ".join(result) + " |",
        "|---" * (2 + len(result)) + "|",
    ]
    for cause in causes:
        known = [row["by_cause"].get(cause) for row in result.values()]
        cells = [f"{_percent(c['coarse'])} / {_percent(c['exact'])}" if c else "-" for c in known]
        lines.append(f"| {cause} | {max(c['cases'] for c in known if c)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *(part for level, row in result.items() for part in _matrix(level, row["confusion"]))])


def _matrix(level: str, confusion: dict[str, dict[str, int]]) -> list[str]:
    answered = sorted({cause for row in confusion.values() for cause in row})
    lines = ["", f"Confusion at {level}: injected (rows), answered (columns), coarse.", ""]
    lines += ["| | " + " | ".join(answered) + " |", "|---" * (1 + len(answered)) + "|"]
    return lines + [
        f"| {truth} | " + " | ".join(str(row.get(cause, "")) for cause in answered) + " |"
        for truth, row in confusion.items()
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def write_results(result: dict[str, Any], folder: Path) -> None:
    """``results.json``, and the tables between the markers of README.md."""
    (folder / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    readme = folder / "README.md"
    before, _, rest = readme.read_text().partition(MARKER)
    _, _, after = rest.partition(MARKER)
    readme.write_text(f"{before}{MARKER}\n{markdown(result)}\n{MARKER}{after}")


def _share(values: Sequence[bool]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--split", default="report")
    parser.add_argument("--out", type=Path, help="folder for results.json")
    parser.add_argument("--errors", action="store_true", help="list the wrong answers")
    args = parser.parse_args()
    cases = load_cases(args.folder / args.split)
    found = answers(cases)
    result = summarize(found)
    for level, row in result.items():
        print(f"{level:14s} coarse {row['coarse']}  exact {row['exact']}  of {row['cases_above_twice_the_floor']};"
              f" false alarms {row['false_alarms']} of {row['clean_cases']}; "
              + ", ".join(f"{k} {v['coarse']} ({v['cases']})" for k, v in row["by_strength"].items()))  # fmt: skip
    if args.errors:
        for a in found:
            if not a.right and not (a.level.startswith("logps") and "config" not in a.level and a.coarse_right):
                print(f"  {a.level:14s} {a.ratio:9.2g} {a.case:75s} -> {a.cause}")
    if args.out:
        write_results(result, args.out)


if __name__ == "__main__":
    main()
