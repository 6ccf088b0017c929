"""The results as text."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.dtype_ladder.formats import FORMATS
from benchmarks.dtype_ladder.results import Line

PARTS = ("weights", "activations", "kv", "all", "native")


def report(lines: Sequence[Line]) -> str:
    """Markdown."""
    rows = [line for line in lines if line["line"] == "mismatch"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    parts = [f"### {model}\n\n{format_table(rows, model)}\n\n{length_table(rows, model)}" for model in models]
    parts.append(ratio_text(lines))
    return "\n\n".join(parts) + "\n"


def format_table(rows: Sequence[Line], model: str) -> str:
    """One row for each format and part, at the longest length."""
    longest = max(row["length"] for row in rows if row["model"] == model)
    head = "| format | rounded | KL, nats a token | chi2, tokens | ESS, tokens | ESS, answers | likeliest token flips |"
    body = [
        f"| {row['format']} | {row['where']} | {with_half(row, 'kl_k3')} | {row['chi2_token']:.2e} | "
        f"{row['ess_token']:.4f} | {row['ess_sequence']:.3f} | {100 * row['flips']:.3f} % |"
        for form in FORMATS
        for part in PARTS
        for row in rows
        if (row["model"], row["format"], row["where"], row["length"]) == (model, form, part, longest)
    ]
    return "\n".join([f"Answers of {longest} tokens.", "", head, "|---" * 7 + "|", *body])


def length_table(rows: Sequence[Line], model: str) -> str:
    """ESS of whole answers by length, everything rounded (the language model: weights only)."""
    mine = [row for row in rows if row["model"] == model]
    where = "all" if {row["format"] for row in mine if row["where"] == "all"} == set(FORMATS) else "weights"
    lengths = sorted({row["length"] for row in mine})
    head = f"| {where} rounded: ESS of answers, KL a token | " + " | ".join(f"T {length}" for length in lengths) + " |"
    body = []
    for form in FORMATS:
        cells = {row["length"]: row for row in mine if (row["format"], row["where"]) == (form, where)}
        texts = [f"{cells[n]['ess_sequence']:.3f}, {cells[n]['kl_k3']:.1e}" if n in cells else "-" for n in lengths]
        body.append(f"| {form} | " + " | ".join(texts) + " |")
    return "\n".join([head, "|---" * (len(lengths) + 1) + "|", *body])


def with_half(row: Line, key: str) -> str:
    """A mean and half its interval."""
    half = row[f"{key}_half"]
    return f"{row[key]:.2e}" if half is None else f"{row[key]:.2e} ± {half:.1e}"


def ratio_text(lines: Sequence[Line]) -> str:
    """bfloat16 against float16."""
    rows = [line for line in lines if line["line"] == "bf16 over fp16"]
    text = []
    for row in rows:
        half = "" if row["kl_ratio_half"] is None else f" ± {row['kl_ratio_half']:.0f}"
        text.append(f"- {row['model']}, {row['where']}, {row['length']} tokens: {row['kl_ratio']:.0f}{half}")
    return "KL(bf16) / KL(fp16); 8 times the rounding error would give 64:\n\n" + "\n".join(text)
