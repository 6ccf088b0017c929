"""The results as text: the mismatch, the frontier at every length, and the verdict on the conjecture."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.frontier.families import FAMILIES, KINDS
from benchmarks.frontier.results import Line

LONG = 200
"""From how many tokens on the conjecture speaks."""


def report(lines: Sequence[Line]) -> str:
    """Markdown."""
    parts = [f"### How far apart\n\n{mismatch_table(lines)}"]
    for sampler in _samplers(lines):
        parts.append(f"### {sampler}: bias, variance, progress\n\n{family_table(lines, sampler)}")
    parts.append(f"### Intermediate kind against the others\n\n{kind_table(lines)}")
    parts.append(verdict(lines))
    return "\n\n".join(parts) + "\n"


def mismatch_table(lines: Sequence[Line]) -> str:
    """One row for each sampler and length."""
    rows = [line for line in lines if line["line"] == "mismatch"]
    head = "| sampler | T | answers | KL, nats a token | ESS, sequences | mean weight | reward: policy, sampler "
    head += "| error of J |"
    body = [
        f"| {r['sampler']} | {r['length']} | {r['responses']} | {r['kl_k3']:.4f} | {r['ess_sequence']:.3f} | "
        f"{r['sequence_weight_mean']:.2f} | {r['reward_policy']:.2f}, {r['reward_sampler']:.2f} | "
        f"{max(r['oracle_relative_error']):.2f} |"
        for r in rows
    ]
    return "\n".join([head, "|---" * 8 + "|", *body])


def family_table(lines: Sequence[Line], sampler: str) -> str:
    """One row a family: |bias| / |J| and tr Var / |J|^2 of a batch, at every length, and the progress."""
    rows = [line for line in lines if line["line"] == "family" and line["sampler"] == sampler]
    lengths = sorted({row["length"] for row in rows})
    head = "| estimator | " + " | ".join(f"T {length}" for length in lengths) + " |"
    body = []
    for name in FAMILIES:
        cells = [row for length in lengths for row in rows if row["family"] == name and row["length"] == length]
        body.append(f"| {name} | " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join([head, "|---" * (len(lengths) + 1) + "|", *body])


def _cell(row: Line) -> str:
    """|bias|, its interval, variance, progress at the middle size."""
    ends = [math.sqrt(max(row[key], 0.0)) for key in ("bias_sq", "bias_sq_low", "bias_sq_high")]
    sizes = sorted(int(key.partition("_")[2]) for key in row if key.startswith("P_") and key[2:].isdigit())
    return f"{ends[0]:.2f} [{ends[1]:.2f}, {ends[2]:.2f}]; {row['variance']:.3g}; {row[f'P_{sizes[1]}']:.3g}"


def kind_table(lines: Sequence[Line]) -> str:
    """Progress of the best intermediate estimator over that of the best of each other kind."""
    others = [kind for kind in KINDS if kind != "intermediate"]
    head = (
        "| sampler | T | responses | measure | best of all kinds | "
        + " | ".join(f"over {kind}" for kind in others)
        + " |"
    )
    body = []
    for line in (line for line in lines if line["line"] == "kinds" and line["length"] >= LONG):
        cells = [f"{line[f'over {k}']:.2f} [{line[f'over {k} low']:.2f}, {line[f'over {k} high']:.2f}]" for k in others]
        best = "; ".join(line[f"best {kind}"] for kind in ("intermediate", "token", "bounded sequence", "mask"))
        body.append(
            f"| {line['sampler']} | {line['length']} | {line['responses']} | {line['measure']} | {best} | "
            + " | ".join(_capped(cell) for cell in cells)
            + " |"
        )
    return "\n".join([head, "|---" * (len(others) + 5) + "|", *body])


def _capped(cell: str) -> str:
    """A ratio over a progress of 0 has no meaning as a number."""
    return "over 1000" if float(cell.partition(" ")[0]) > 1000 else cell


def decide(line: Line) -> str:
    """For one sampler, length and step size: does the conjecture hold, fail, or is it open?

    It holds where the best intermediate estimator makes more progress than the best token-level one and than unbounded
    sequence weights, each with a 95 % interval above 1; it fails where one of the two intervals is below 1.
    """
    ends = [(line[f"over {kind} low"], line[f"over {kind} high"]) for kind in ("token", "sequence")]
    if any(high < 1 for _, high in ends):
        return "fails"
    return "holds" if all(low > 1 for low, _ in ends) else "open"


def verdict(lines: Sequence[Line]) -> str:
    """How often each decision falls at T >= 200, by sampler and measure."""
    rows = [line for line in lines if line["line"] == "kinds" and line["length"] >= LONG]
    text = []
    for sampler in _samplers(lines):
        for measure in sorted({row["measure"] for row in rows}):
            mine = [row for row in rows if row["sampler"] == sampler and row["measure"] == measure]
            said = [f"T {row['length']}, {row['responses']} responses: {decide(row)}" for row in mine]
            text.append(f"- {sampler}, {measure}: " + "; ".join(said))
    return "Conjecture at T >= 200:\n\n" + "\n".join(text)


def _samplers(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line["sampler"] for line in lines if line["line"] == "mismatch"))
