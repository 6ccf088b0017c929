"""The plot of a recipe's README: reward, mismatch and ESS over the steps of one or more runs, as one SVG.

python scripts/plot_runs.py runs/quickstart --out recipes/quickstart/run.svg
python scripts/plot_runs.py runs/a runs/b --names "no fix" TIS --out both.svg
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))
from drawing import label, legend_below, to_svg

from trl_offpolicy.diagnosis.report.step_plots import running_mean
from trl_offpolicy.run_folder.run_data import MetricsLog, read_metrics

PANELS = (
    ("reward", "", "reward (mean of 5 steps)", 5),
    ("offpolicy/mismatch/kl_k3", "offpolicy/kept/kl_k3", "KL k3, nats a token", 1),
    ("offpolicy/weight/ess_token", "offpolicy/weight_applied/ess_token", "ESS (token)", 1),
)
"""Quantity before the correction, the same after it, title, steps in a mean."""


def draw(figure: Figure, logs: dict[str, MetricsLog]) -> None:
    """A panel a quantity, a line a run, dashed after the correction; quantities that no run logged are left out."""
    shown = [panel for panel in PANELS if any(log.series(panel[0]).values for log in logs.values())]
    for axes, (before, after, title, window) in zip(
        figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True
    ):
        for place, (name, log) in enumerate(logs.items()):
            for key, style, suffix in ((before, "-", ""), (after, "--", ", corrected")):
                data = log.series(key) if key else None
                if data is not None and data.values:
                    axes.plot(
                        data.steps, running_mean(data.values, window), style, color=f"C{place}", label=name + suffix
                    )
        label(axes, "optimizer step", "", title)
    legend_below(figure, axes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--names", nargs="+", help="one a run (default: the folders' names)")
    parser.add_argument("--out", type=Path, required=True, help="SVG file")
    args = parser.parse_args()
    names = args.names or [run.name for run in args.runs]
    if len(names) != len(args.runs):
        parser.error(f"--names must give one name a run ({len(args.runs)}), but got {len(names)}.")
    logs = {name: read_metrics(run) for name, run in zip(names, args.runs, strict=True)}
    args.out.write_text(to_svg(f"Runs: {', '.join(names)}", 2.4, partial(draw, logs=logs)))
    print(args.out)


if __name__ == "__main__":
    main()
