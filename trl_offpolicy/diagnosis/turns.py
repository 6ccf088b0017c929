"""The recorded tokens by turn, as a table: whether the mismatch comes after what a tool or user wrote."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from trl_offpolicy.diagnosis.numbers import format_number
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP
from trl_offpolicy.run_folder.rollouts import Bools, RecordedRollouts

TURN_TITLES = ("turn", "responses", "tokens", "mean log-ratio", "mean |log-ratio|", "KL k3", "token ESS", "dropped")
MOST_TURNS = 8
"""Turns with a row of their own; later ones share one."""


@dataclass(frozen=True)
class TurnRow:
    """One turn; means over its tokens.

    Args:
        turn: "1" to "8", or "9 or more".
        responses: completions that have it.
        tokens: trainable tokens with both log-probs.
        log_ratio: mean of old - sampling, nats.
        abs_log_ratio: mean of its size, nats.
        kl_k3: KL(sampler||trainer), estimate k3, nats per token.
        ess: effective sample size of the tokens' ratios, a fraction.
        dropped: share of the tokens that the correction dropped.
    """

    turn: str
    responses: int
    tokens: int
    log_ratio: float
    abs_log_ratio: float
    kl_k3: float
    ess: float
    dropped: float

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of :data:`TURN_TITLES`."""
        numbers = (self.log_ratio, self.abs_log_ratio, self.kl_k3, self.ess)
        return (self.turn, f"{self.responses}", f"{self.tokens}", *map(format_number, numbers), f"{self.dropped:.1%}")


@dataclass(frozen=True)
class TurnTable:
    """The turns that had tokens, ascending; at least two."""

    rows: tuple[TurnRow, ...]

    @property
    def text(self) -> str:
        """What the table says about the turns after the first one, in a sentence."""
        first, later = self.rows[0], max(self.rows[1:], key=lambda row: row.abs_log_ratio)
        return (
            f"Mean |log-ratio| is {format_number(first.abs_log_ratio)} nats in turn {first.turn} and at most "
            f"{format_number(later.abs_log_ratio)} after it (turn {later.turn})."
        )

    def as_dict(self) -> list[dict[str, object]]:
        """The rows as plain values, for JSON."""
        return [asdict(row) for row in self.rows]


def turn_table(rollouts: RecordedRollouts | None) -> TurnTable | None:
    """The table over all recorded tokens; None if every response is one turn.

    Tokens that the policy did not sample, such as the output of a tool, end a turn.
    """
    if rollouts is None or rollouts.turn is None:
        return None
    turn = np.minimum(rollouts.turn, MOST_TURNS)
    known = np.unique(turn).tolist()
    return TurnTable(tuple(_row(rollouts, turn == one, one) for one in known)) if len(known) > 1 else None


def _row(rollouts: RecordedRollouts, here: Bools, turn: int) -> TurnRow:
    log_ratio = rollouts.log_ratio[here].astype(np.float64)
    ratio = np.exp(np.clip(log_ratio, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))
    return TurnRow(
        turn=f"{MOST_TURNS + 1} or more" if turn == MOST_TURNS else f"{turn + 1}",
        responses=int(np.unique(rollouts.row[here]).size),
        tokens=int(here.sum()),
        log_ratio=float(log_ratio.mean()),
        abs_log_ratio=float(np.abs(log_ratio).mean()),
        kl_k3=float((ratio - log_ratio - 1).mean()),
        ess=float(ratio.sum() ** 2 / (ratio.size * (ratio**2).sum())),
        dropped=float(1 - rollouts.keep[here].mean()),
    )
