"""The report's text parts: the tokens with the largest log-ratio in context, and example completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np

from trl_offpolicy.diagnosis.report.page import render_rows
from trl_offpolicy.diagnosis.report.rollout_numbers import completion_states, largest_log_ratios
from trl_offpolicy.diagnosis.report.summary import format_number
from trl_offpolicy.run_folder.layout import ADVANTAGE, COMPLETION, COMPLETION_IDS, PROMPT, REWARD
from trl_offpolicy.run_folder.rollouts import RecordedRollouts, fetch_rows

Decode = Callable[[list[int]], str]

TOP_TOKENS = 20
CONTEXT_TOKENS = 12
"""Tokens shown on each side of a token with a large log-ratio."""
EXAMPLES_PER_END = 3
"""Completions shown of the first and of the last recorded step."""
MAX_TEXT = 1500
"""Longer prompts and completions are cut in the middle."""

STATE_NAMES = ("kept", "partly dropped", "dropped")


def render_top_tokens(rollouts: RecordedRollouts, decode: Decode | None) -> str:
    """Table of the TOP_TOKENS largest |log-ratio|, each with its text (or token ids) around it."""
    tokens = largest_log_ratios(rollouts, TOP_TOKENS)
    records = fetch_rows(rollouts, rollouts.row[tokens].tolist(), (COMPLETION_IDS, COMPLETION))
    rows = []
    for token in tokens.tolist():
        row, position = int(rollouts.row[token]), int(rollouts.position[token])
        ids = records[row][COMPLETION_IDS]
        logp, log_ratio = float(rollouts.sampling_logp[token]), float(rollouts.log_ratio[token])
        cells = (
            str(ids[position]) if ids else "–",
            format_number(math.exp(logp)),
            format_number(math.exp(logp + log_ratio)),
            f"{log_ratio:+.3g}",
            "kept" if rollouts.keep[token] else "dropped",
            f"{rollouts.steps[row]} / {position}",
        )
        rows.append((cells, _context(records[row], position, decode)))
    titles = ("token id", "p sampler", "p trainer", "log-ratio, nats", "token", "step / position")
    return render_rows(titles, rows)


def _context(record: dict[str, Any], position: int, decode: Decode | None) -> str:
    """Text around a token with the token marked; token ids and the completion's text without a tokenizer."""
    ids: list[int] | None = record[COMPLETION_IDS]
    text = shorten(str(record[COMPLETION] or ""))
    if not ids:
        return f"<code>{escape(text)}</code>"
    start = max(0, position - CONTEXT_TOKENS)
    pieces = (
        ids[start:position],
        ids[position : position + 1],
        ids[position + 1 : position + 1 + CONTEXT_TOKENS],
    )
    before, token, after = (escape(decode(piece) if decode else " ".join(map(str, piece))) for piece in pieces)
    gap = "" if decode else " "
    lead = "…" if start else ""
    tail = "…" if position + 1 + CONTEXT_TOKENS < len(ids) else ""
    marked = f"<code>{lead}{before}{gap}<mark>{token}</mark>{gap}{after}{tail}</code>"
    return marked if decode else f'{marked}<br><span class="soft">{escape(text)}</span>'


def render_examples(rollouts: RecordedRollouts) -> str:
    """Completions of the first and the last recorded step with reward and fate."""
    first, last = int(rollouts.steps.min()), int(rollouts.steps.max())
    chosen = [*_spread(rollouts, first), *(_spread(rollouts, last) if last != first else ())]
    records = fetch_rows(rollouts, chosen, (PROMPT, COMPLETION, REWARD, ADVANTAGE))
    states = completion_states(rollouts)
    return "\n".join(_render_example(rollouts, row, records[row], STATE_NAMES[states[row]]) for row in chosen)


def _spread(rollouts: RecordedRollouts, step: int) -> Sequence[int]:
    """Rows of a step, evenly spaced so that they come from different prompts."""
    rows = np.flatnonzero(rollouts.steps == step)
    places = np.linspace(0, len(rows) - 1, min(EXAMPLES_PER_END, len(rows))).round().astype(int)
    chosen: list[int] = rows[places].tolist()
    return chosen


def _render_example(rollouts: RecordedRollouts, row: int, record: dict[str, Any], state: str) -> str:
    facts = [f"step {rollouts.steps[row]}", f"reward {_number(record[REWARD])}"]
    facts += [f"advantage {_number(record[ADVANTAGE])}", f"{rollouts.trainable[row]} tokens", state]
    prompt, completion = (escape(shorten(str(record[name] or ""))) for name in (PROMPT, COMPLETION))
    return (
        f"<article>\n<h3>{escape(', '.join(facts))}</h3>\n"
        f'<span class="soft">prompt</span><pre>{prompt}</pre>\n'
        f'<span class="soft">completion</span><pre>{completion}</pre>\n</article>'
    )


def _number(value: float | None) -> str:
    return f"{value:.4g}" if value is not None and math.isfinite(value) else "–"


def shorten(text: str) -> str:
    """Cut the middle out of a text longer than MAX_TEXT characters and say how much is missing."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]} [… {len(text) - 2 * half} characters left out …] {text[-half:]}"
