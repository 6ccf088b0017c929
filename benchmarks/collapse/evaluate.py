"""Does the collapse risk warn in time, and does it leave healthy runs alone?

    python benchmarks/collapse/evaluate.py RUNS [--seeds 1 3] [--threshold 0.5] [--keep tests/control/runs --only ...]

Reads what ``train.py`` wrote. A run has collapsed if its learner's reward fell by 30 % and did not come back within 100
optimizer steps, or if its gradient norm went above 10 times its rolling median and the reward fell after that (Liu
2026, "Off-Policy Drift in LLM RL", problem 2). The risk is computed row by row from what was logged up to there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from collapse_step import collapse_step

from trl_offpolicy.control import collapse_risk
from trl_offpolicy.diagnosis import MetricsLog, read_metrics


class Judged(NamedTuple):
    """A run: the step of its collapse, that of the first alarm, and the risk at every logged step."""

    name: str
    collapse: int | None
    alarm: int | None
    risks: list[float]
    steps: list[int]

    @property
    def lead(self) -> int | None:
        """Optimizer steps from the alarm to the collapse; negative: too late."""
        return None if self.collapse is None or self.alarm is None else self.collapse - self.alarm


def judge(folder: Path, threshold: float) -> Judged:
    """Walk a run; an alarm is the first row at or above the threshold."""
    rows = read_metrics(folder).rows
    risks = [collapse_risk(MetricsLog(rows[: place + 1])).score for place in range(len(rows))]
    steps = [int(row["step"]) for row in rows]
    alarm = next((step for step, risk in zip(steps, risks, strict=True) if risk >= threshold), None)
    return Judged(folder.name, collapse_step(MetricsLog(rows), "learner_reward"), alarm, risks, steps)


def auroc(positive: Sequence[float], negative: Sequence[float]) -> float:
    """Share of pairs in the right order, ties half."""
    pairs = [(p > n) + 0.5 * (p == n) for p in positive for n in negative]
    return sum(pairs) / len(pairs) if pairs else float("nan")


def by_row(runs: Sequence[Judged], horizon: int = 200) -> tuple[list[float], list[float]]:
    """Risks of rows that a collapse follows within ``horizon`` steps, and of rows of runs that never collapse."""
    before = [
        risk
        for run in runs
        if run.collapse is not None
        for step, risk in zip(run.steps, run.risks, strict=True)
        if run.collapse - horizon <= step < run.collapse
    ]
    return before, [risk for run in runs if run.collapse is None for risk in run.risks]


KEPT = (
    "step", "reward", "learner_reward", "grad_norm", "offpolicy/loss/clip_region_fraction",
    "offpolicy/rollout/response_length_mean", "offpolicy/weight_applied/ess_sequence",
    *(f"offpolicy/{group}/{name}" for group in ("mismatch", "total") for name in ("ess_sequence", "chi2_sequence")),
    *(f"offpolicy/{group}/chi2_token{end}" for group in ("mismatch", "staleness", "total") for end in ("", "_p95")),
)  # fmt: skip


def keep(folder: Path, target: Path) -> None:
    """What the risk reads of a run, as columns with four digits: a fixture for the tests."""
    rows = read_metrics(folder).rows
    columns = {key: [float(f"{row[key]:.4g}") for row in rows] for key in KEPT if key in rows[0]}
    target.mkdir(parents=True, exist_ok=True)
    (target / f"{folder.name}.json").write_text(json.dumps(columns) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", nargs="*", type=int)
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    folders = [path for path in sorted(args.runs.iterdir()) if (path / "metrics.jsonl").is_file()]
    wanted = [path for path in folders if args.seeds is None or int(path.name.rpartition("-")[2]) in args.seeds]
    wanted = [path for path in wanted if args.only is None or path.name in args.only]
    if args.keep:
        for path in wanted:
            keep(path, args.keep)
    runs = [judge(path, args.threshold) for path in wanted]
    print(f"{'run':<18} {'collapse':>8} {'alarm':>6} {'lead':>5} {'largest risk':>13}")
    for run in runs:
        shown = ["-" if value is None else str(value) for value in (run.collapse, run.alarm, run.lead)]
        print(f"{run.name:<18} {shown[0]:>8} {shown[1]:>6} {shown[2]:>5} {max(run.risks):>13.2f}")
    collapsed, healthy = [r for r in runs if r.collapse is not None], [r for r in runs if r.collapse is None]
    warned = [run for run in collapsed if run.lead is not None and run.lead > 0]
    leads = sorted(run.lead for run in warned if run.lead is not None)
    print(f"warned before the collapse: {len(warned)} of {len(collapsed)}; lead {leads} optimizer steps")
    print(f"false alarms: {sum(run.alarm is not None for run in healthy)} of {len(healthy)} healthy runs")
    print(f"AUROC by row (collapse within 200 steps): {auroc(*by_row(runs)):.3f}")
    before = [max([risk for step, risk in zip(r.steps, r.risks, strict=True) if step < r.collapse]) for r in collapsed]
    print(f"AUROC by run (largest risk before the collapse): {auroc(before, [max(r.risks) for r in healthy]):.3f}")


if __name__ == "__main__":
    main()
