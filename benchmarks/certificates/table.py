"""The numbers of all seeds as tables: bias, and mean squared error at a batch, term by kind of mismatch."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.certificates.certificates import BATCH, Certificate
from benchmarks.certificates.claims import CLAIMS
from benchmarks.certificates.mismatch import KINDS
from benchmarks.certificates.terms import rows

COLUMNS = ("unbiased", "bias", "largest", "error", "angle", "length", "variance", "mse")
"""Of a cell: seeds without a bias; the median bias and the largest; medians of the rest, see ``Certificate``."""

DRAWN = 1e-5
"""A smaller error of drawn batches is rounding in float32: no batch differed from the row's exact control."""

HIGHLIGHTS = (
    "no correction", "raw token", "raw prefix", "raw sequence_mean", "raw sequence", "truncate token",
    "truncate sequence", "band token", "shaped token", "prefix_min", "prefix", "ess sequence",
    "ratio_band token", "ratio_band sequence_mean", "divergence_band k3 sequence_mean",
    "divergence_band binary_kl_both token", "outlier_veto", "second_moment_budget",
    "mixture, raw sequence", "mixture of responses, raw sequence",
    "paper/icepop", "paper/kpop", "paper/geometric-mask", "paper/sequence-tis",
    "ppo_clip", "ppo_clip, times the product", "ppo_clip, bypass", "cispo, bypass", "gspo, bypass", "topr",
    "advantages grpo", "advantages rloo", "advantages opob",
    "token_mean, product", "seq_mean_token_mean, product", "seq_mean_token_sum_norm, product",
    "normalize original sequence generation_batch",
)  # fmt: skip
"""The rows of the short table in the README."""


def cell(certificates: Sequence[Certificate]) -> list[float]:
    """The numbers of ``COLUMNS`` over the seeds."""
    angles = [one.angle for one in certificates if not math.isnan(one.angle)]
    middle = {
        name: statistics.median(getattr(one, name) for one in certificates)
        for name in ("bias", "error", "length", "variance", "mse")
    }
    return [
        sum(one.unbiased for one in certificates),
        middle["bias"],
        max(one.bias for one in certificates),
        middle["error"],
        statistics.median(angles) if angles else math.nan,
        middle["length"],
        middle["variance"],
        middle["mse"],
    ]


def rounded(value: float) -> float | int | None:
    """For the file: 4 digits, and None where there is no number.

    Example:
        >>> rounded(0.123456), rounded(3.0), rounded(math.nan)
        (0.1235, 3, None)
    """
    if math.isnan(value):
        return None
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() else short


def results_of(outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All seeds together, as JSON: ``cells`` by kind and row, in the order of ``columns``, and ``claims``."""
    kinds = list(outcomes[0]["certificates"])
    cells: dict[str, Any] = {kind: {} for kind in kinds}
    for kind in kinds:
        for name in outcomes[0]["certificates"][kind]:
            found = [Certificate(**outcome["certificates"][kind][name]) for outcome in outcomes]
            cells[kind][name] = [rounded(value) for value in cell(found)]
    claims = {}
    for name, claim in CLAIMS.items():
        findings = [outcome["claims"][name] for outcome in outcomes]
        claims[name] = {
            "page": claim.page,
            "quote": claim.quote,
            "number": claim.number,
            "holds": sum(one["holds"] for one in findings),
            "median": rounded(statistics.median(one["value"] for one in findings)),
            "least": rounded(min(one["value"] for one in findings)),
            "largest": rounded(max(one["value"] for one in findings)),
        }
    table = {name: {"group": row.group, "part": row.part, "exact": row.exact} for name, row in rows().items()}
    return {
        "seeds": len(outcomes),
        "batch": BATCH,
        "kinds": {kind: KINDS[kind][0] for kind in kinds},
        "columns": COLUMNS,
        "rows": table,
        "cells": cells,
        "claims": claims,
    }


def write_results(results: dict[str, Any], path: Path) -> None:
    """One line a cell, so that a change of one number is a change of one line."""
    text = json.dumps(results, indent=1)
    path.write_text(re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found.group().split()), text) + "\n")


# ------------------------------------------------------------------------------------------------------------- text


def bias_text(numbers: Sequence[float | None], *, exact: bool, seeds: int) -> str:
    """``0`` where no seed has a bias, else the median with the angle, and how many seeds have none.

    From drawn batches: ``< x`` where nine seeds of ten are within two standard errors, x, of no bias.
    """
    unbiased, bias, _, error, angle = numbers[:5]
    assert unbiased is not None and bias is not None and error is not None
    drawn = not exact and error > DRAWN
    if drawn and unbiased >= 0.9 * seeds:
        return f"< {2 * error:.1g}"
    if unbiased == seeds:
        return "0"
    degrees = "" if angle is None else f" ({angle:.0f}°)"
    some = f", 0 in {unbiased}" if unbiased and not drawn else ""
    return f"{'≈ ' if drawn else ''}{bias:.2g}{degrees}{some}"


def mse_text(numbers: Sequence[float | None]) -> str:
    """Variance, then mean squared error."""
    variance, mse = numbers[6:8]
    return f"{variance:.2g}, {mse:.2g}"


def table_of(results: dict[str, Any], names: Sequence[str], *, what: str) -> list[str]:
    """A table in Markdown of some rows; ``what`` is "bias" or "mse"."""
    kinds = list(results["kinds"])
    lines = ["| term | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for name in names:
        exact = results["rows"][name]["exact"]
        texts = []
        for kind in kinds:
            numbers = results["cells"][kind][name]
            text = bias_text(numbers, exact=exact, seeds=results["seeds"]) if what == "bias" else mse_text(numbers)
            texts.append(text)
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return lines


def claims_table(results: dict[str, Any]) -> list[str]:
    """The claims of the docs with their numbers."""
    lines = ["| the docs say | where | holds | number | median | least to largest |", "|---|---|---|---|---|---|"]
    for claim in results["claims"].values():
        quote = claim["quote"].replace("|", "\\|")
        span = f"{claim['least']:.2g} to {claim['largest']:.2g}"
        lines.append(
            f'| "{quote}" | {claim["page"]} | {claim["holds"]} of {results["seeds"]} | {claim["number"]} | '
            f"{claim['median']:.2g} | {span} |"
        )
    return lines


def full_table(results: dict[str, Any]) -> str:
    """``table.md``: every row, by group, bias first, then variance and error."""
    lines = [
        "# Every term, every kind of mismatch",
        "",
        f"Written by `run.py` from `results.json`, {results['seeds']} seeds. [README.md](README.md) explains it.",
        "",
        "## Claims of the docs",
        "",
        *claims_table(results),
    ]
    groups = dict.fromkeys(row["group"] for row in results["rows"].values())
    for group in groups:
        names = [name for name, row in results["rows"].items() if row["group"] == group]
        for what, title in (("bias", "bias (angle)"), ("mse", f"variance and mean squared error at batch {BATCH}")):
            lines += ["", f"## {group[0].upper()}{group[1:]}: {title}", "", *table_of(results, names, what=what)]
    return "\n".join(lines) + "\n"


def between_marks(page: str, mark: str, lines: Sequence[str]) -> str:
    """The page with ``lines`` between ``<!-- mark -->`` and ``<!-- end of mark -->``.

    Raises:
        ValueError: the page lacks the marks.
    """
    pattern = rf"(<!-- {mark} -->\n).*?(<!-- end of {mark} -->)"
    text, count = re.subn(pattern, lambda found: found[1] + "\n".join(lines) + "\n" + found[2], page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"page must have the marks {mark!r} once, but got them {count} times.")
    return text


def run_text(results: dict[str, Any]) -> str:
    """One line: command, commit, date, versions and cost."""
    cost = results["cost"]
    return (
        f"`{results['command']}`, {results['batches']} batches for what is drawn; {results['date']}, commit "
        f"`{results['commit']}`, torch {cost['torch']}, one thread of an {results['processor']}: "
        f"{cost['cpu_seconds_of_all_runs']:.0f} CPU seconds."
    )


def short_tables(results: dict[str, Any], page: str) -> str:
    """The README with the number of seeds, the tables of the highlights and of the claims, and how it was run."""
    page = re.sub(r"There are \d+ random tasks", f"There are {results['seeds']} random tasks", page)
    page = between_marks(page, "bias", table_of(results, HIGHLIGHTS, what="bias"))
    page = between_marks(page, "error", table_of(results, HIGHLIGHTS, what="mse"))
    page = between_marks(page, "claims", claims_table(results))
    return between_marks(page, "run", [run_text(results)])
