"""Data for the report's text parts: the tokens with the largest log-ratio in context, and example completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trl_offpolicy.diagnosis.numbers import format_number
from trl_offpolicy.diagnosis.report.rollout_numbers import completion_states, largest_log_ratios
from trl_offpolicy.run_folder.layout import (
    ADVANTAGE,
    COMPLETION,
    COMPLETION_IDS,
    COMPLETION_MASK,
    PROMPT,
    REWARD,
    STEP,
    WORST_FOLDER,
)
from trl_offpolicy.run_folder.rollouts import RecordedRollouts, fetch_rows
from trl_offpolicy.run_folder.worst import DISAGREEMENT, MOST_RESPONSES, PER_TOKEN, read_worst, worst_response

Decode = Callable[[list[int]], str]

TOP_TOKENS = 20
CONTEXT_TOKENS = 12
"""Tokens shown on each side of a token with a large log-ratio."""
EXAMPLES_PER_END = 3
"""Completions shown of the first and of the last recorded step."""
MAX_TEXT = 1500
"""Longer prompts and completions are cut in the middle."""

SHADES = (0.05, 0.2, 0.7, 2.0)
"""|Log-ratio| in nats from which a token is coloured, and coloured more: about 5, 20 and 100 %, and a factor of 7."""

STATE_NAMES = ("kept", "partly dropped", "dropped")


class Context(NamedTuple):
    """A token with the text before and after it."""

    before: str
    token: str
    after: str


class TopToken(NamedTuple):
    """A token with a large log-ratio.

    Args:
        cells: id, both log-probs (with the probabilities), log-ratio, fate, step and position, as text.
        context: the token in its text; None if no token ids were recorded.
        text: the completion's text, if the context does not show it.
    """

    cells: tuple[str, ...]
    context: Context | None
    text: str


class Span(NamedTuple):
    """A token of a response: its text, how it is shown (:func:`shade`), and what is said of it."""

    text: str
    shade: str
    tip: str


class WorstResponse(NamedTuple):
    """A response with a large disagreement: facts in one line and as numbers to sort by, its prompt, and its tokens."""

    facts: str
    values: tuple[str, ...]
    prompt: str
    spans: tuple[Span, ...]


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
            f"{logp:.4g} ({format_number(math.exp(logp))})",
            f"{logp + log_ratio:.4g} ({format_number(math.exp(logp + log_ratio))})",
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


def worst_responses(
    run_dir: str | Path, rollouts: RecordedRollouts | None, decode: Decode | None
) -> list[WorstResponse]:
    """The responses with the largest mean |log-ratio|: those kept while training, else out of the recorded ones."""
    kept = read_worst(Path(run_dir) / WORST_FOLDER)
    if not kept and rollouts is not None and len(rollouts.row):
        count = np.bincount(rollouts.row, minlength=len(rollouts.steps))
        total = np.bincount(rollouts.row, weights=np.abs(rollouts.log_ratio), minlength=len(rollouts.steps))
        mean = total / np.maximum(count, 1)
        rows = [row for row in np.argsort(-mean, kind="stable")[:MOST_RESPONSES].tolist() if mean[row] > 0]
        columns = (STEP, PROMPT, REWARD, ADVANTAGE, COMPLETION_IDS, *PER_TOKEN)
        records = fetch_rows(rollouts, rows, columns)
        kept = [worst_response(records[row], decode) for row in rows]
    return [_worst(one) for one in kept]


def _worst(one: Mapping[str, Any]) -> WorstResponse:
    mean, step, tokens = format_number(one[DISAGREEMENT]), one[STEP] + 1, one["tokens"]
    reward, advantage = _number(one[REWARD]), _number(one[ADVANTAGE])
    facts = [f"mean |log-ratio| {mean} nats", f"step {step}", f"reward {reward}", f"advantage {advantage}"]
    facts.append(f"{tokens} tokens")
    size, start = len(one[COMPLETION_MASK]), one["start"]
    if size < one["tokens"]:
        facts.append(f"shown: {start} to {start + size - 1}")
    columns = [one[name] or [None] * size for name in PER_TOKEN]
    texts = one["text"] or ["□"] * size  # no ids were recorded
    spans = (_span(text, start + at, *values) for at, (text, *values) in enumerate(zip(texts, *columns, strict=True)))
    values = (mean, str(step), reward, advantage, str(tokens))
    return WorstResponse(", ".join(facts), values, shorten(one[PROMPT]), tuple(spans))


def _span(
    text: str,
    position: int,
    trainable: bool,
    sampling: float | None,
    old: float | None,
    weight: float | None,
    keep: bool | None,
) -> Span:
    if not trainable:
        return Span(text, "other", f"token {position}: not sampled by the policy, or not trained on")
    if sampling is None or old is None:
        return Span(text, "", f"token {position}: log-prob sampler {_number(sampling)}, trainer {_number(old)}")
    gap = old - sampling
    tip = f"token {position}: log-prob sampler {sampling:.4g}, trainer {old:.4g}, log-ratio {gap:+.3g}"
    tip += "" if weight is None else f", weight {weight:.3g}"
    dropped = keep is False
    return Span(text, shade(gap) + " dropped" * dropped, tip + ", dropped" * dropped)


def shade(log_ratio: float) -> str:
    """The class of a token on the page: ``less`` or ``more`` likely for the trainer, and how much, 1 to 4.

    Example:
        >>> shade(0.01), shade(-0.1), shade(3.0)
        ('', 'less1', 'more4')
    """
    size = sum(abs(log_ratio) > limit for limit in SHADES)
    return f"{'less' if log_ratio < 0 else 'more'}{size}" if size else ""


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
