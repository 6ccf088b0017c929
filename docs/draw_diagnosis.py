"""Draw the pictures of docs/diagnosis.md and write its tables: ``python docs/draw_diagnosis.py``.

Tree, causes and thresholds are read off ``trl_offpolicy.diagnosis``, examples off ``diagnosis_examples.json``, which
``benchmarks/faults/examples.py`` writes; nothing about them stands here.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import source_rules
from drawing import Pictures, write
from drawing import picture as register
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.diagnosis.report.plots import BLUE, GREY, ORANGE
from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.diagnosis.verdict.tree import TREE, Step

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.log_courses.curves import SCENARIOS
from benchmarks.log_courses.run import LENGTHS, alarms

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "diagnosis.md"
EXAMPLES: dict[str, dict[str, Any]] = json.loads(PAGE.with_name("diagnosis_examples.json").read_text())
"""Cause -> what was injected into a real model and what was found."""
PICTURES: Pictures = {}
picture = partial(register, PICTURES)
COLOURS = {"critical": ORANGE, "warning": BLUE, "notice": GREY}
WRAP = 40
"""Letters a line of the fix."""
LINE = 0.30
"""Inches a line of text."""


def symptom_lines(step: Step) -> list[str]:
    """One line a symptom, with its limit; ``and`` before what must hold as well."""
    limits = Thresholds()
    lines = [f"{one.metric} {one.sign} {one.limit(limits):g}" for one in step.any_of]
    return lines + [f"and {one.metric} {one.sign} {one.limit(limits):g}" for one in (*step.all_of, *step.given)]


def first_fix(step: Step) -> list[str]:
    """The first sentence of the fix, wrapped."""
    fix = step.instead.split(":")[0] or CAUSES[step.cause].fix
    return textwrap.wrap(fix.split(". ")[0].split("; ")[0].rstrip(".") + ".", WRAP)


def draw_step(axes: Axes, step: Step, top: float) -> float:
    """One branch: symptoms, arrow, cause, fix; returns where the next one starts, in lines."""
    about = CAUSES[step.cause]
    symptoms = symptom_lines(step)
    fix = first_fix(step)
    height = max(len(symptoms), len(fix), 2)
    for i, text in enumerate(symptoms):
        axes.text(0.0, top + i + 0.5, text, va="center", fontsize=7.5, family="monospace")
    middle = top + height / 2
    axes.annotate("", (0.46, middle), (0.42, middle), arrowprops={"arrowstyle": "->", "color": GREY})
    axes.text(0.47, middle - 0.45, about.title, va="center", fontsize=7.8, weight="bold", color=COLOURS[step.severity])
    axes.text(0.47, middle + 0.45, f"{step.severity}, branch {about.branch}", va="center", fontsize=7.5, color=GREY)
    for i, text in enumerate(fix):
        axes.text(0.785, middle + i - (len(fix) - 1) / 2, text, va="center", fontsize=7.5)
    axes.plot([0, 1], [top + height + 0.25] * 2, linestyle="-", color=GREY, linewidth=0.4, alpha=0.6)
    return top + height + 0.5


def total_lines() -> float:
    """Height of the tree in lines, the heading included."""
    return 1.5 + sum(max(len(symptom_lines(step)), len(first_fix(step)), 2) + 0.5 for step in TREE)


@picture("The decision tree: symptom, cause, fix", height=LINE * 0.62 * total_lines())
def diagnosis_tree(figure: Figure) -> None:
    """One row a branch, in the order in which the tree is walked."""
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set(xlim=(0, 1.09), ylim=(total_lines(), 0))
    for x, text in ((0.0, "symptom (any of, offpolicy/...)"), (0.47, "cause"), (0.785, "smallest fix")):
        axes.text(x, 0.6, text, va="center", fontsize=8.5, color=GREY)
    top = 1.5
    for step in TREE:
        top = draw_step(axes, step, top)


@picture("Token probabilities of engine and trainer under eleven faults", height=6.3)
def fault_scatter(figure: Figure) -> None:
    """One panel a fault: probability of the same tokens in the engine and in the trainer."""
    shown = {cause: one for cause, one in EXAMPLES.items() if "points" in one}
    panels = list(figure.subplots(3, 4, sharex=True, sharey=True).flat)
    for axes, (cause, one) in zip(panels, shown.items(), strict=False):
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":")
        axes.plot(*one["points"], "o", color=BLUE, markersize=2.2, alpha=0.6, markeredgewidth=0, linestyle="none")
        axes.set(title=textwrap.fill(CAUSES[cause].title, 18), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), aspect="equal")
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    figure.supxlabel("probability in the engine", fontsize=9)
    figure.supylabel("probability in the trainer", fontsize=9)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def threshold_table() -> str:
    """Every limit with its default, meaning and source."""
    rows = [
        (f"`{one.name}`", f"{one.default:g}", one.metadata["meaning"].replace("|", r"\|"), one.metadata["source"])
        for one in fields(Thresholds)
    ]
    return table(("threshold", "default", "meaning", "source"), rows)


def rules_table() -> str:
    """Every numeric rule of the sources that a log shows, with what the doctor says beyond its limit."""
    limits = Thresholds()
    rows = []
    for one in source_rules.RULES:
        read = [key for key in one.beyond if one.inside.get(key) != one.beyond[key]]
        shown = ", ".join(f"`{name}` {getattr(limits, name):g}" for name in one.limits)
        rows.append((one.source, one.rule, ", ".join(f"`{key}`" for key in read), shown, one.verdict))
    head = ("source", "rule", "read from", "limit", "beyond it")
    elsewhere = table(("source", "rule", "read by"), source_rules.ELSEWHERE)
    unread = table(("source", "rule", "why nothing reads it"), source_rules.UNREAD)
    return (
        f"{table(head, rows)}\n\nWhat something else than the tree reads:\n\n{elsewhere}\n\n"
        f"What nothing reads:\n\n{unread}"
    )


NOT_OF_ONE_BATCH = ("other_weights", "sync_rounding", "parallelism", "on_purpose")
"""Causes that are seen by comparing weights or settings, or over a run: no batch shows them."""


def example(cause: str) -> str:
    """What was injected, where, and what the kit said of it."""
    if cause in NOT_OF_ONE_BATCH:
        return ""
    if cause not in EXAMPLES:
        raise ValueError(
            f"diagnosis_examples.json must hold an example of {cause!r}, but got none. Write it with "
            "benchmarks/faults/examples.py; CONTRIBUTING.md, Adding a cause, says how."
        )
    one = EXAMPLES[cause]
    size = f", KL k3 {one['kl_k3']:.2g}, correlation {one['pearson']:.4f}" if "kl_k3" in one else ""
    said = "; ".join(f"*{text}*" for text in one["said"])
    levels = " (from log-probs alone; then with all that is known)" if "points" in one and len(one["said"]) > 1 else ""
    return f"- **Example**: {one['injected']} ({one['where']}){size}. Answer{levels}: {said}"


def cause_sections() -> str:
    """Each cause with meaning, confirmation, fix and snippet."""
    parts = []
    for name, about in CAUSES.items():
        snippet = f"\n\n```yaml\n{about.snippet.rstrip()}\n```" if about.snippet else ""
        parts.append(
            f"### {about.title} (`{name}`, branch {about.branch})\n\n{about.meaning}\n\n"
            f"- **Check**: {about.confirm}\n- **Fix**: {about.fix}\n{example(name)}".rstrip()
            + snippet
        )
    return "\n\n".join(parts)


def courses_table() -> str:
    """Share of made-up runs with a warning or a critical finding, from the counts of the benchmark."""
    found = json.loads((ROOT / "benchmarks" / "log_courses" / "results.json").read_text())["verdicts"]
    rows = []
    for healthy, held_back in itertools.product((True, False), (False, True)):
        names = [one.name for one in SCENARIOS.values() if (one.healthy, one.held_back) == (healthy, held_back)]
        shares = [
            sum(alarms(found[name][f"{steps}/{every}"]) for name in names) / len(names) for steps, every in LENGTHS
        ]
        kind = ("healthy" if healthy else "broken") + (", held back" if held_back else "")
        rows.append((kind, str(len(names)), *(f"{share:.1%}" for share in shares)))
    spans = [f"{steps} steps" + (f", every {every}th logged" if every > 1 else "") for steps, every in LENGTHS]
    return table(("runs", "kinds", *spans), rows)


MAPS = {
    "thresholds": threshold_table,
    "causes": cause_sections,
    "rules": rules_table,
    "courses": courses_table,
}


def main() -> None:
    """Write the picture, and the tables between their markers on the page."""
    write(PICTURES)
    text = PAGE.read_text()
    for name, make in MAPS.items():
        between = re.compile(rf"(<!-- {name} -->\n).*(<!-- end of {name} -->)", flags=re.DOTALL)
        text = between.sub(partial(_between, make()), text)
    PAGE.write_text(text)


def _between(made: str, marks: re.Match[str]) -> str:
    return f"{marks[1]}{made}\n{marks[2]}"


if __name__ == "__main__":
    main()
