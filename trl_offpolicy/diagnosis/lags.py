"""The numbers by version lag over some steps, as a table: what is mismatch, and what staleness adds to it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from trl_offpolicy.diagnosis.attribution.by_lag import LagShares, lag_shares
from trl_offpolicy.diagnosis.numbers import format_number
from trl_offpolicy.functional.lags import LAG_NAMES
from trl_offpolicy.run_folder.layout import STEP
from trl_offpolicy.run_folder.run_data import MetricsLog

LAG_TITLES = ("version lag", "tokens", "mean log-ratio", "mean |log-ratio|", "token ESS", "clipped")
_MEANS = {"log_ratio": "log_ratio_mean", "abs_log_ratio": "logp_diff_mean", "ess": "ess_token", "clip": "clip_fraction"}


@dataclass(frozen=True)
class LagRow:
    """One version lag; means over its tokens, None = not logged.

    Args:
        lag: "0" to "8", or "9_or_more".
        tokens: trainable tokens.
        log_ratio: mean of current - sampling, nats.
        abs_log_ratio: mean of its size, nats.
        ess: effective sample size of the tokens' ratios, a fraction, mean over the logged steps.
        clip: share that the loss clips.
    """

    lag: str
    tokens: int
    log_ratio: float | None
    abs_log_ratio: float | None
    ess: float | None
    clip: float | None

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of :data:`LAG_TITLES`."""
        clipped = "–" if self.clip is None else f"{self.clip:.1%}"
        shown = (format_number(value) for value in (self.log_ratio, self.abs_log_ratio, self.ess))
        return (self.lag.replace("_", " "), f"{self.tokens}", *shown, clipped)


@dataclass(frozen=True)
class LagTable:
    """The lags that had tokens, ascending."""

    rows: tuple[LagRow, ...]

    @property
    def stale(self) -> bool:
        """True if some tokens were sampled by older weights."""
        return any(row.lag != LAG_NAMES[0] for row in self.rows)

    @property
    def text(self) -> str:
        """What the table says about mismatch and staleness, in a sentence or two."""
        fresh = next((row for row in self.rows if row.lag == LAG_NAMES[0]), None)
        if fresh is None or fresh.abs_log_ratio is None:
            return "No token was sampled by the current weights, so mismatch and staleness cannot be told apart."
        said = f"Mean |log-ratio| at lag 0 is {format_number(fresh.abs_log_ratio)} nats: engine mismatch alone."
        old = next((row for row in reversed(self.rows) if row is not fresh and row.abs_log_ratio is not None), None)
        if old is None or old.abs_log_ratio is None:
            return said
        lag = old.lag.replace("_", " ")
        said = f"{said} At lag {lag} it is {format_number(old.abs_log_ratio)}; what is beyond lag 0 is staleness."
        shares = self.shares
        return said if shares is None else f"{said} {shares.text[0].upper()}{shares.text[1:]}."

    @property
    def shares(self) -> LagShares | None:
        """Engine mismatch and staleness, of the squares of the mean |log-ratio|; None if they cannot be told apart."""
        known = [(place, row) for place, name in enumerate(LAG_NAMES) for row in self.rows if row.lag == name]
        return lag_shares(
            (place, float(row.tokens), row.abs_log_ratio**2) for place, row in known if row.abs_log_ratio is not None
        )

    def as_dict(self) -> list[dict[str, object]]:
        """The rows as plain values, for JSON."""
        return [asdict(row) for row in self.rows]


def lag_table(log: MetricsLog, steps: tuple[int, int] | None = None) -> LagTable | None:
    """The table over the logged steps (first, last); None = all. None if no lag was logged in them."""
    rows = [row for row in log.rows if steps is None or steps[0] <= row[STEP] <= steps[1]]
    found = []
    for lag in LAG_NAMES:
        below = f"offpolicy/lag/{lag}/"
        here = [row for row in rows if row.get(below + "tokens", 0.0) > 0]
        if not here:
            continue
        tokens = [row[below + "tokens"] for row in here]
        means = {}
        for name, key in _MEANS.items():
            known = [(row[below + key], count) for row, count in zip(here, tokens, strict=True) if below + key in row]
            total = sum(count for _, count in known)
            means[name] = sum(value * count for value, count in known) / total if total else None
        found.append(LagRow(lag=lag, tokens=round(sum(tokens)), **means))
    return LagTable(tuple(found)) if found else None
