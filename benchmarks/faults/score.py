"""Attribute every case that run.py made; count the right, sane, wrong, unknown and silent answers.

python benchmarks/faults/score.py runs/faults --split tune --errors
python benchmarks/faults/score.py runs/faults --split report --totals                   # gives no kind away
python benchmarks/faults/score.py runs/faults --split report --out benchmarks/faults    # writes into README.md
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from cases import Case, load_cases, rescored_file
from kind import CLEAN, Kind
from kinds import KINDS, kind_of

from trl_offpolicy.diagnosis.attribution.attribute import Attribution, attribute
from trl_offpolicy.diagnosis.attribution.distances import kl_k3
from trl_offpolicy.diagnosis.attribution.recorded import attribute_run
from trl_offpolicy.diagnosis.thresholds import SAME_POLICY_KL
from trl_offpolicy.run_folder.layout import RUN_FILE
from trl_offpolicy.run_folder.rollouts import read_rollouts

PATHS = {
    "probe": "log-probs, what both sides declare, tests with the model",
    "doctor --model": "what a run folder holds, and tests with the run's model",
    "doctor": "what a run folder holds: log-probs, and what both sides declare",
    "logps": "log-probs alone",
}
VERDICTS = ("right", "sane", "unknown", "wrong", "silent")
CONFIDENT = 0.5
BINS = (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)
"""Edges of the calibration table."""
ABOVE = 2.0
"""Times the noise floor that a mismatch must have to be scored, if it is one that log-probs show."""
MARKER = "<!-- tables of score.py -->"
FIGURE = "calibration.png"


@dataclass(frozen=True)
class Answer:
    """What one path said of one case.

    Args:
        case: name of the case.
        world: model that played both sides.
        kind: of the fault.
        path: one of :data:`PATHS`.
        cause: that was named.
        confidence: 0 to 1.
        ratio: KL k3 over the noise floor.
        verdict: one of :data:`VERDICTS`; of a clean case "right" or "wrong".
    """

    case: str
    world: str
    kind: str
    path: str
    cause: str
    confidence: float
    ratio: float
    verdict: str

    @property
    def clean(self) -> bool:
        return kind_of(self.kind).family == CLEAN

    @property
    def scored(self) -> bool:
        """Clean, or a fault that can be seen."""
        return self.clean or kind_of(self.kind).hidden or self.ratio > ABOVE


def verdict_of(kind: Kind, cause: str, world: str = "") -> str:
    """How an answer is counted. In a mixture of experts rounding also flips experts, so either answer is sane.

    Example:
        >>> verdict_of(KINDS["doubled_bos"], "stale_weights"), verdict_of(KINDS["doubled_bos"], "none")
        ('wrong', 'silent')
    """
    if cause in kind.right:
        return "right"
    if cause in kind.sane or (world == "moe" and kind.family == "precision" and cause == "routing"):
        return "sane"
    return {"unknown": "unknown", "none": "silent"}.get(cause, "wrong")


def answers(folder: Path) -> list[Answer]:
    """All paths of all cases of a split's folder."""
    found = [answer for case in load_cases(folder) for answer in of_case(case)]
    found += [answer for run in sorted(folder.glob("*.run")) for answer in of_run(run)]
    again = (_rescored(answer, folder) for answer in found if answer.path == "doctor")
    return found + [answer for answer in again if answer is not None]


def _rescored(doctor: Answer, folder: Path) -> Answer | None:
    """The answer of ``doctor --model`` for the same case; None if rescore.py has not made it."""
    file = rescored_file(folder, doctor.case)
    if not file.exists():
        return None
    said, kind = json.loads(file.read_text()), kind_of(doctor.kind)
    verdict = _verdict(kind, said["cause"], doctor.world)
    return replace(doctor, path="doctor --model", verdict=verdict, **said)


def of_case(case: Case) -> Iterator[Answer]:
    """The three paths of a batch. A path that has not been tested with the model is left out, except if clean."""
    kind, evidence = kind_of(case.kind), case.evidence
    recorded = replace(evidence.at_level("logps+config"), rescored_per_token_logps=None)
    seen = {
        "probe": evidence if evidence.tested or not _needs_tests(kind, evidence) else None,
        "doctor": recorded,
        "logps": replace(recorded, engine=None, trainer=None),
    }
    ratio = kl_k3((evidence.old_per_token_logps - evidence.sampling_per_token_logps)[evidence.observed])
    for path, given in seen.items():
        if given is not None:
            yield _answer(case.name, case.world, kind, path, attribute(given), ratio / SAME_POLICY_KL)


def _needs_tests(kind: Kind, evidence: Any) -> bool:
    return kind.hidden or attribute(evidence).cause != "none"


def of_run(folder: Path) -> Iterator[Answer]:
    """The two paths of a recorded run."""
    info = json.loads((folder / RUN_FILE).read_text())
    about = info["case"]
    rollouts = read_rollouts(folder)
    assert rollouts is not None
    for path, given in (("doctor", info), ("logps", {})):
        found = attribute_run(rollouts, given)
        assert found is not None
        ratio = kl_k3(rollouts.log_ratio) / SAME_POLICY_KL
        yield _answer(folder.stem, about["world"], kind_of(about["kind"]), path, found, ratio)


def _answer(case: str, world: str, kind: Kind, path: str, found: Attribution, ratio: float) -> Answer:
    verdict = _verdict(kind, found.cause, world)
    return Answer(case, world, kind.name, path, found.cause, float(found.confidence), float(ratio), verdict)


def _verdict(kind: Kind, cause: str, world: str) -> str:
    """:func:`verdict_of`; whatever is said of a clean case is wrong."""
    verdict = verdict_of(kind, cause, world)
    return "wrong" if kind.family == CLEAN and verdict != "right" else verdict


# ---------------------------------------------------------------------------------------------------------- summaries


def summarize(found: Sequence[Answer]) -> dict[str, Any]:
    """Counts by path; of faults above the floor, and of clean cases."""
    out: dict[str, Any] = {}
    for path in PATHS:
        mine = [a for a in found if a.path == path and a.scored]
        faults, clean = [a for a in mine if not a.clean], [a for a in mine if a.clean]
        if not mine:
            continue
        named = [a for a in faults if a.cause not in ("unknown", "none")]
        sure = [a for a in faults if a.verdict == "wrong" and a.confidence >= CONFIDENT]
        certain = [a for a in named if a.confidence >= 0.9]
        out[path] = {
            "cases": len(faults),
            "kinds": len({a.kind for a in faults}),
            "share": {name: _share([a.verdict == name for a in faults]) for name in VERDICTS},
            "right_or_sane": _share([a.verdict in ("right", "sane") for a in faults]),
            "right_or_sane_by_kind": _by_kind(faults),
            "confident_wrong": _share([a in sure for a in faults]),
            "named_at_90": {"cases": len(certain), "right": _share([a.verdict in ("right", "sane") for a in certain])},
            "false_alarms": sum(a.verdict != "right" for a in clean),
            "clean_cases": len(clean),
            "by_family": _counts(faults, lambda a: KINDS[a.kind].family),
            "by_world": _counts(faults, lambda a: a.world),
            "calibration": calibration(named),
            "confusion": _confusion(mine),
        }
    return out


def _by_kind(faults: Sequence[Answer]) -> float | None:
    """Mean over kinds of the share of right or sane answers, so that no kind counts more than another."""
    by: dict[str, list[bool]] = defaultdict(list)
    for a in faults:
        by[a.kind].append(a.verdict in ("right", "sane"))
    return round(sum(sum(row) / len(row) for row in by.values()) / len(by), 4) if by else None


def _counts(faults: Sequence[Answer], key: Any) -> dict[str, dict[str, int]]:
    by: dict[str, Counter[str]] = defaultdict(Counter)
    for a in faults:
        by[key(a)][a.verdict] += 1
    return {name: dict(row) for name, row in sorted(by.items())}


def _confusion(mine: Sequence[Answer]) -> dict[str, dict[str, int]]:
    """Kind (rows; all clean variants in one) -> answers."""
    by: dict[str, Counter[str]] = defaultdict(Counter)
    for a in mine:
        by[CLEAN if a.clean else a.kind][a.cause] += 1
    return {name: dict(row) for name, row in sorted(by.items(), key=lambda pair: _family_first(pair[0]))}


def _family_first(name: str) -> tuple[int, str]:
    order = list(KINDS)
    return (order.index(name), "") if name in KINDS else (len(order), name)


def calibration(named: Sequence[Answer]) -> list[dict[str, Any]]:
    """Answers that name a cause, by confidence: how many, mean confidence, share right, share right or sane."""
    rows = []
    for low, high in pairwise(BINS):
        inside = [a for a in named if low <= a.confidence < high or (high == BINS[-1] and a.confidence == high)]
        rows.append({
            "from": low, "to": high, "cases": len(inside),
            "confidence": round(sum(a.confidence for a in inside) / len(inside), 3) if inside else None,
            "right": _share([a.verdict == "right" for a in inside]),
            "right_or_sane": _share([a.verdict in ("right", "sane") for a in inside]),
        })  # fmt: skip
    return rows


def _share(values: Sequence[bool]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


# ------------------------------------------------------------------------------------------------- tables and figure


def totals(result: dict[str, Any]) -> list[str]:
    """Lines of the first table: verdicts by path. It names no kind."""
    titles = ["path", *VERDICTS, "right or sane", "the same, mean over kinds", "confident and wrong",
              "named with 90 %: right or sane", "cases (kinds)", "false alarms"]  # fmt: skip
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for path, row in result.items():
        cells = [path, *(_percent(row["share"][name]) for name in VERDICTS), _percent(row["right_or_sane"]),
                 _percent(row["right_or_sane_by_kind"]), _percent(row["confident_wrong"]),
                 f"{_percent(row['named_at_90']['right'])} of {row['named_at_90']['cases']}",
                 f"{row['cases']} ({row['kinds']})", f"{row['false_alarms']} of {row['clean_cases']}"]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def markdown(result: dict[str, Any]) -> str:
    """Tables for the README: verdicts by path, by family, calibration, and the confusion by kind."""
    lines = totals(result)
    lines += _verdict_table("family", "by_family", result) + _verdict_table("model", "by_world", result)
    lines += ["", "Calibration: answers that name a cause, by confidence.", "",
              "| path | confidence | answers | right | right or sane |", "|---" * 5 + "|"]  # fmt: skip
    for path, row in result.items():
        lines += [
            f"| {path} | {one['from']} to {one['to']} | {one['cases']} | {_percent(one['right'])} | "
            f"{_percent(one['right_or_sane'])} |"
            for one in row["calibration"]
        ]
    for path, row in result.items():
        lines += _matrix(path, row["confusion"])
    return "\n".join(lines)


def _verdict_table(title: str, key: str, result: dict[str, Any]) -> list[str]:
    """Right + sane / unknown / wrong + silent by path."""
    names = sorted({name for row in result.values() for name in row[key]})
    lines = ["", f"| {title} (right + sane / unknown / wrong + silent) | " + " | ".join(result) + " |",
             "|---" * (1 + len(result)) + "|"]  # fmt: skip
    for name in names:
        cells = []
        for row in result.values():
            seen = Counter(row[key].get(name, {}))
            good, bad = seen["right"] + seen["sane"], seen["wrong"] + seen["silent"]
            cells.append(f"{good} / {seen['unknown']} / {bad}" if seen else "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _matrix(path: str, confusion: dict[str, dict[str, int]]) -> list[str]:
    """Every kind with its answers; the right and the sane ones are bold."""
    lines = ["", f"Answers of {path} by kind (right and sane ones bold, cases behind them).", "",
             "| family | kind | answers |", "|---" * 3 + "|"]  # fmt: skip
    for name, row in confusion.items():
        kind = KINDS.get(name)
        good = ("none",) if kind is None else (*kind.right, *kind.sane)
        cells = [
            f"**{cause}** {count}" if cause in good else f"{cause} {count}" for cause, count in sorted(row.items())
        ]
        lines.append(f"| {CLEAN if kind is None else kind.family} | {name} | {', '.join(cells)} |")
    return lines


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def draw(result: dict[str, Any], path: Path) -> None:
    """The calibration figure: confidence against the share that is right or sane, with the number of answers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(4.5, 4))
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, label="as sure as right")
    for name, row in result.items():
        points = [one for one in row["calibration"] if one["cases"]]
        x, y = [one["confidence"] for one in points], [one["right_or_sane"] for one in points]
        axes.plot(x, y, marker="o", label=name)
        for one in points:
            axes.annotate(str(one["cases"]), (one["confidence"], one["right_or_sane"]), fontsize=7,
                          textcoords="offset points", xytext=(4, 4))  # fmt: skip
    axes.set(xlabel="confidence of the answer", ylabel="share right or sane", xlim=(0, 1.05), ylim=(0, 1.05))
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def write_results(result: dict[str, Any], found: Sequence[Answer], folder: Path) -> None:
    """``results.json``, the figure, and the tables between the markers of README.md."""
    listed = [asdict(a) for a in found]
    (folder / "results.json").write_text(json.dumps({"summary": result, "answers": listed}, indent=1) + "\n")
    draw(result, folder / FIGURE)
    readme = folder / "README.md"
    before, _, rest = readme.read_text().partition(MARKER)
    _, _, after = rest.partition(MARKER)
    readme.write_text(f"{before}{MARKER}\n{markdown(result)}\n{MARKER}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--split", default="report")
    parser.add_argument("--out", type=Path, help="folder for results.json, the figure and README.md")
    parser.add_argument("--totals", action="store_true", help="print the first table alone, which names no kind")
    parser.add_argument("--worlds", nargs="+", help="only these")
    parser.add_argument("--errors", action="store_true", help="list the answers that are not right")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found = [a for a in answers(args.folder / args.split) if args.worlds is None or a.world in args.worlds]
    result = summarize(found)
    if args.totals:
        print("\n".join(totals(result)))
        return
    for path, row in result.items():
        shares = "  ".join(f"{name} {_percent(row['share'][name])}" for name in VERDICTS)
        print(f"{path:7s} {shares}  of {row['cases']} cases, {row['kinds']} kinds; confident and wrong "
              f"{_percent(row['confident_wrong'])}; false alarms {row['false_alarms']} of {row['clean_cases']}; "
              f"named with 90 %: {_percent(row['named_at_90']['right'])} of {row['named_at_90']['cases']}")  # fmt: skip
    left_out = sorted({a.case for a in found if not a.scored})
    print(f"not scored, below {ABOVE:g} times the floor: {', '.join(left_out) or 'none'}")
    if args.errors:
        for a in found:
            if a.scored and a.verdict != "right":
                print(f"  {a.path:7s} {a.verdict:8s} {a.confidence:.2f} {a.ratio:8.1e} {a.case:50s} -> {a.cause}")
    if args.out:
        write_results(result, found, args.out)


if __name__ == "__main__":
    main()
