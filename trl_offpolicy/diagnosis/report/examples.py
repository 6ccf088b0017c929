"""Data for the report's text parts: the tokens with the largest log-ratio in context, and example completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from trl_offpolicy.diagnosis.numbers import format_number
from trl_offpolicy.diagnosis.report.rollout_numbers import completion_states, largest_log_ratios
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


class Context(NamedTuple):
    """A token with the text before and after it."""

    before: str
    token: str
    after: str


class TopToken(NamedTuple):
    """A token with a large log-ratio.

    Args:
        cells: id, both probabilities, log-ratio, fate, step and position, as text.
        context: the token in its text; None if no token ids were recorded.
        text: the completion's text, if the context does not show it.
    """

    cells: tuple[str, ...]
    context: Context | None
    text: str


class Example(NamedTuple):
    """A recorded completion: step, reward, advantage, length and fate in one line, and the texts."""

    facts: str
    prompt: str
    completion: str


def top_tokens(rollouts: RecordedRollouts, decode: Decode | None) -> list[TopToken]:
    """The TOP_TOKENS largest |log-ratio|, largest first, each with its text (or token ids) around it."""
    tokens = largest_log_ratios(rollouts, TOP_TOKENS)
    records = fetch_rows(rollouts, rollouts.row[tokens].tolist(), (COMPLETION_IDS, COMPLETION))
    found = []
    for token in tokens.tolist():
        row, position = int(rollouts.row[token]), int(rollouts.position[token])
        ids = records[row][COMPLETION_IDS]
        logp, log_ratio = float(rollouts.sampling_logp[token]), float(rollouts.log_ratio[token])
        token_id, context = "–", None
        if ids:
            token_id, context = str(ids[position]), _context(ids, position, decode)
        cells = (
            token_id,
            format_number(math.exp(logp)),
            format_number(math.exp(logp + log_ratio)),
            f"{log_ratio:+.3g}",
            "kept" if rollouts.keep[token] else "dropped",
            f"{rollouts.used_in[row]} / {position}",
        )
        text = shorten(str(records[row][COMPLETION] or ""))
        found.append(TopToken(cells, context, "" if context and decode else text))
    return found


def _context(ids: list[int], position: int, decode: Decode | None) -> Context:
    """The text (or ids) of the tokens around ``position``, with dots if the completion continues."""
    start, end = max(0, position - CONTEXT_TOKENS), position + 1 + CONTEXT_TOKENS
    pieces = (ids[start:position], ids[position : position + 1], ids[position + 1 : end])
    before, token, after = (decode(piece) if decode else " ".join(map(str, piece)) for piece in pieces)
    gap = "" if decode else " "  # a tokenizer's text has its own spaces
    lead, tail = "…" * (start > 0), "…" * (end < len(ids))
    return Context(f"{lead}{before}{gap}", token, f"{gap}{after}{tail}")


def example_completions(rollouts: RecordedRollouts) -> list[Example]:
    """Completions of the first and the last recorded step with reward and fate."""
    first, last = int(rollouts.steps.min()), int(rollouts.steps.max())
    chosen = [*_spread(rollouts, first), *(_spread(rollouts, last) if last != first else ())]
    records = fetch_rows(rollouts, chosen, (PROMPT, COMPLETION, REWARD, ADVANTAGE))
    states = completion_states(rollouts)
    return [_example(rollouts, row, records[row], STATE_NAMES[states[row]]) for row in chosen]


def _spread(rollouts: RecordedRollouts, step: int) -> Sequence[int]:
    """Rows of a step, evenly spaced so that they come from different prompts."""
    rows = np.flatnonzero(rollouts.steps == step)
    places = np.linspace(0, len(rows) - 1, min(EXAMPLES_PER_END, len(rows))).round().astype(int)
    chosen: list[int] = rows[places].tolist()
    return chosen


def _example(rollouts: RecordedRollouts, row: int, record: dict[str, Any], state: str) -> Example:
    facts = [f"step {rollouts.used_in[row]}", f"reward {_number(record[REWARD])}"]
    facts += [f"advantage {_number(record[ADVANTAGE])}", f"{rollouts.trainable[row]} tokens", state]
    prompt, completion = (shorten(str(record[name] or "")) for name in (PROMPT, COMPLETION))
    return Example(", ".join(facts), prompt, completion)


def _number(value: float | None) -> str:
    return f"{value:.4g}" if value is not None and math.isfinite(value) else "–"


def shorten(text: str) -> str:
    """Cut the middle out of a text longer than MAX_TEXT characters and say how much is missing."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]} [… {len(text) - 2 * half} characters left out …] {text[-half:]}"
