"""Numbers that tell causes apart, from log-probs alone. All are pure functions of :class:`TokenEvidence`.

Notation, in nats: a = log mu of the engine, b = log pi_old of the trainer, d = b - a of a token, H = the entropy of the
trainer's distribution. Further p = e^b and z = d / (1 - p): noise of equal size on every logit moves the log-prob of a
token by about 1 - p times that noise. So z of rounding errors has about the same spread at every token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trl_offpolicy.diagnosis.attribution.distances import MAX_LOG_RATIO, distance, spread, token_k3
from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence
from trl_offpolicy.diagnosis.attribution.traces.drawn_before import penalised
from trl_offpolicy.diagnosis.attribution.traces.noise import (
    noise_level,
    noise_rms,
    self_median,
    self_ratio,
    trusted_floor,
)
from trl_offpolicy.diagnosis.attribution.traces.surprise import LEAST_TOKENS, in_bits, surprise_of
from trl_offpolicy.diagnosis.attribution.traces.written import written
from trl_offpolicy.diagnosis.attribution.traces.zeros import zeros

Array = NDArray[Any]
TOP_SHARE = 0.02
"""The tokens with the largest |d| whose share of the mismatch is looked at."""
SPIKES, IN_FEW = 40.0, 0.7
"""Kurtosis of z and share of the mismatch in the top tokens, from which on together it is in few tokens: SmolLM2-135M
in bf16 and with fp8 weights has 11 to 15 and 0.4."""
LEAST_DOUBT = 0.05
"""z is left out where 1 - p is smaller: there d / (1 - p) is rounding."""
EARLY_TOKENS = 3
LEAST_MOVED, MOST_CHANCE = 10, 0.5
"""Disagreeing tokens that are looked for at other places, and the share that chance may find."""
LEAST_ENTROPY = 0.05
"""Entropy in nats below which a token says nothing about what it is the log-prob of."""
DEEP = 2.3
"""Nats by which the trainer is below the engine at a token that it finds deep: a tenth of the probability."""
LEAST_ALIKE, LEAST_MARKED = 8, 3
"""Tokens from which on a number or factor that all share is judged, and tokens of the same mark (a bound, a zero)."""
SAME_TOKEN = 0.02
"""|d| in nats up to which a log-prob that may be the most likely token's is that of the sampled one."""
OVERLAP = 0.6
"""Share of a row's tokens that another row must have to be compared with it."""
IMPROBABLE = 1e-4
"""Probability of a response below which its copy in the group is no chance, as ``rollout/copied_fraction`` has it."""


@dataclass(frozen=True)
class Features:
    """Scale-free numbers about one batch; NaN where they cannot be computed.

    Args:
        tokens: observed tokens.
        k3: KL(mu || old), nats per token.
        floor: the noise floor, nats per token.
        self_ratio: k3 over the k3 between two scorings of the trainer, on the same tokens; NaN without a second one.
        drift: mean of d / its root mean square; -1 = all d are equal and negative.
        positive: share of tokens (a count) with d above the noise.
        bulk: median |d| / root mean square of d; near 0 = a few tokens make the whole mismatch.
        top_tokens: share of the k3 in the top 2 % of tokens.
        spikes: kurtosis of z; about 3 to 5 for rounding errors.
        temperature_fit: R^2 of d = s (b + H); NaN without entropies, and for a handful of tokens.
        temperature_rest: squares that this fit leaves / those that d = constant leaves.
        temperature_slope: s; 1 - 1 / T at small mismatch.
        temperature_own: R^2 of the engine's own log-probs under that slope; near 1 under another temperature.
        surprise_fit: R^2 of d on a and a^2: the part of d that follows from the token's log-prob; 0 for a handful.
        unit_fit: R^2 of d = s a; 0 for a handful of tokens.
        unit_rest: squares that d = s a leaves / those that d = constant leaves. Near 1 where all a are alike, so that
            a number fits as well as a factor.
        clipped: share of tokens (a count) at the smallest a whose b is lower, and not the same for all of them.
        forced: share of the k3 at tokens whose a is exactly 0 although the trainer gives them a probability below 1.
        forced_alone: share of these tokens without another one beside them.
        forced_last: share of these tokens in runs up to the end of their row.
        forced_fixed: share of these tokens at places where all rows hold such a zero and the same token.
        forced_tokens: number of these tokens.
        forced_depth: largest -d of these tokens, nats.
        forced_z: standard errors by which the mean of -log p of these tokens is above the entropy; NaN without
            entropies.
        forced_beside_z: standard errors by which the mean of -log p of these tokens is above that of the others.
        others_below: share of the other tokens (a count) whose d is negative beyond the noise.
        written_as: the form that all of the engine's numbers have ("2 decimals", "bfloat16"), if rounding to it
            explains every difference; else empty.
        first: mean square of z of the first token / that of all tokens.
        entropies_in_bits: the mean of -log p is that share of the mean entropy, or the other way round.
        self_median: median difference of the trainer's two scorings, nats.
        copied: share of the responses of a probability below 1e-4 that another one of their group equals.
        missing_engine, missing_trainer: share of the trainable tokens without a finite log-prob of that side.
        all_zero: every a is exactly 0.
        above_zero: share of a that is above 0, which no log-prob of a token is.
        scatter: what d spreads beyond the noise, between its 5 % and 95 % quantiles / |median d|; infinite where the
            median is noise, and for a handful of tokens.
        grain: the same for a kept mass at least: it is chosen in steps of the probability of its least likely token.
        shift: distance between a[t] and b[t + s] of the best s in -3..3 / distance in place, in the rows that disagree.
        onset: share of disagreeing rows that agree up to a token and hardly ever after it.
        disagreeing_rows: share of rows (a count) that hold disagreement well above the noise.
        early: mean square of z in the first three tokens / that in all tokens.
        by_token: correlation of z of equal tokens in different prompt groups (intra-class).
        swapped: distance between a and b of the best other row / distance in place, median of the rows that disagree.
        elsewhere: share of the disagreeing tokens (a count) whose a is another token's b, beyond chance.
        above_entropy: share of tokens (a count) whose -a is above the entropy; 0 = a is never that of a rare token.
        deep: share of tokens (a count) to which the trainer gives less than a tenth of the engine's probability.
        top_z: tokens that agree, less the sum of e^a, in standard errors; NaN if hardly one agrees. If a is the most
            likely token's log-prob, a token agrees where it is that one, and that has the probability e^a.
        missing_tail: nats by which -b - H must fall short at least if d is the log of a kept mass; NaN without
            entropies.
        exact_rows: share of rows (a count) that agree at every token although others do not.
        rewritten: distance between a and the best simple function of b (running sum, probability, other base) /
            distance in place.
        rewritten_as: name of that function.
        surprise: mean of -b - H, nats: 0 if the tokens were drawn from the trainer's distribution.
        surprise_z: the same / its standard error over rows; NaN without entropies.
        has_experts: a side declares a mixture of experts, whose flips are in few tokens.
        trusted_floor: the largest noise floor that arithmetic in the declared precision explains, nats per token.
        both_low: both sides declare the same 16-bit arithmetic.
        penalised: 1 = d is positive at every token that its row holds already, and negative at every new one; NaN
            without token ids, and for too few of them.
    """

    tokens: int
    k3: float
    floor: float
    self_ratio: float
    drift: float
    positive: float
    bulk: float
    top_tokens: float
    spikes: float
    temperature_fit: float
    temperature_slope: float
    surprise_fit: float
    unit_fit: float
    unit_rest: float
    clipped: float
    forced: float
    shift: float
    onset: float
    disagreeing_rows: float
    early: float
    by_token: float
    temperature_own: float = float("nan")
    temperature_rest: float = float("nan")
    swapped: float = float("nan")
    elsewhere: float = float("nan")
    above_entropy: float = float("nan")
    deep: float = 0.0
    exact_rows: float = 0.0
    rewritten: float = float("nan")
    rewritten_as: str = ""
    surprise: float = float("nan")
    surprise_z: float = float("nan")
    trusted_floor: float = float("inf")
    both_low: bool = False
    has_experts: bool = False
    forced_alone: float = 0.0
    forced_last: float = 0.0
    forced_fixed: float = 0.0
    forced_tokens: int = 0
    forced_depth: float = 0.0
    forced_z: float = float("nan")
    forced_beside_z: float = float("nan")
    others_below: float = 0.0
    written_as: str = ""
    first: float = float("nan")
    entropies_in_bits: bool = False
    self_median: float = 0.0
    copied: float = 0.0
    missing_engine: float = 0.0
    missing_trainer: float = 0.0
    all_zero: bool = False
    above_zero: float = 0.0
    scatter: float = float("inf")
    grain: float = 0.0
    top_z: float = float("nan")
    missing_tail: float = float("nan")
    penalised: float = float("nan")

    @property
    def in_few(self) -> bool:
        """Most of the mismatch is in few tokens, as rounding never is."""
        return self.spikes > SPIKES and self.top_tokens > IN_FEW


def extract(evidence: TokenEvidence) -> Features:
    """Compute all :class:`Features` of a batch."""
    seen = evidence.observed
    a = np.where(seen, evidence.sampling_per_token_logps, np.nan)
    d = np.clip(np.where(seen, evidence.old_per_token_logps, np.nan) - a, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    b, noise = a + d, noise_rms(evidence)
    flat, log_mu, size = d[seen], a[seen], token_k3(d[seen])
    rms, enough = float(np.sqrt(np.mean(flat**2))) or 1e-30, flat.size >= LEAST_ALIKE
    fit, slope, temperature_own, temperature_rest = _temperature(evidence, b, d)
    surprise, surprise_z = surprise_of(evidence, _of_either(evidence, b))
    rewritten, rewritten_as = _rewritten(a, evidence.old_per_token_logps, d, evidence.entropies)
    rows, entropies = disagreeing_rows(d, noise), evidence.entropies
    z = _scaled(b, d)
    return Features(
        tokens=int(seen.sum()),
        k3=float(size.mean()),
        floor=noise_level(evidence),
        self_ratio=self_ratio(evidence),
        self_median=self_median(evidence),
        drift=float(flat.mean()) / rms,
        positive=float(np.mean(flat > 4 * noise)),
        bulk=float(np.median(np.abs(flat))) / rms,
        top_tokens=_top_share(size, TOP_SHARE),
        spikes=_kurtosis(z),
        temperature_fit=fit,
        temperature_slope=slope,
        temperature_own=temperature_own,
        temperature_rest=temperature_rest,
        surprise_fit=_r_squared(flat, np.stack([np.ones_like(log_mu), log_mu, log_mu**2], 1)) if enough else 0.0,
        unit_fit=_r_squared(flat, log_mu[:, None], centred=False) if enough else 0.0,
        unit_rest=1 - _r_squared(flat, log_mu[:, None]),
        clipped=_clipped(log_mu, flat, noise),
        **zeros(evidence, b, d, noise),
        written_as=_form(log_mu, flat, noise),
        shift=_shift(a[rows], b[rows], d[rows], noise),
        onset=_onset(d[rows], noise),
        disagreeing_rows=float(rows.sum()) / max(1, int(seen.any(1).sum())),
        early=_early(z, EARLY_TOKENS),
        first=_early(z, 1),
        by_token=_by_token(z, evidence),
        penalised=penalised(evidence, d),
        swapped=_swapped(a, b, rows),
        elsewhere=_elsewhere(a, b, d, noise),
        above_entropy=_never_rare(a, entropies),
        deep=float(np.mean(flat < -DEEP)),
        exact_rows=_exact_rows(d),
        rewritten=rewritten,
        rewritten_as=rewritten_as,
        surprise=surprise,
        surprise_z=surprise_z,
        trusted_floor=trusted_floor(evidence),
        both_low=_both_low(evidence),
        has_experts=any(side is not None and side.experts for side in (evidence.engine, evidence.trainer)),
        copied=_copied(evidence),
        missing_engine=_missing(evidence, evidence.sampling_per_token_logps, sampled=True),
        missing_trainer=_missing(evidence, evidence.old_per_token_logps, sampled=False),
        all_zero=not np.any(log_mu),
        above_zero=float(np.mean(log_mu > ROUNDED)),
        scatter=_scatter(flat, noise),
        grain=float(np.exp(np.quantile(b[seen], 0.05)) / max(abs(np.median(flat)), 1e-30)),
        top_z=_top_z(log_mu, flat),
        entropies_in_bits=entropies is not None and in_bits(b[seen], entropies[seen]),
        missing_tail=float("nan") if entropies is None else _missing_tail(flat, b[seen], entropies[seen]),
    )


def _form(log_mu: Array, d: Array, noise: float) -> str:
    found = written(log_mu, d, noise)
    return found.form if found.explains else ""


def _clipped(log_mu: Array, d: Array, noise: float) -> float:
    """Share of tokens at the lowest log-prob that the trainer finds lower still, each by its own amount.

    Short answers repeat one log-prob as well: that of a rare answer. There the trainer's repeat, too.
    """
    cut = (log_mu <= log_mu.min() + 1e-9) & (d < -4 * noise)
    values = np.unique(np.round(d[cut], 4))
    return float(np.mean(cut)) if cut.sum() >= LEAST_MARKED and 2 * len(values) > cut.sum() else 0.0


def _scatter(d: Array, noise: float) -> float:
    low, middle, high = np.quantile(d, (0.05, 0.5, 0.95))
    if len(d) < LEAST_ALIKE or abs(middle) <= 20 * noise:
        return float("inf")
    return float(max(high - low - 4 * noise, 0.0) / abs(middle))


def _top_z(log_mu: Array, d: Array) -> float:
    """NaN where hardly a token agrees: then nothing shows that any of the numbers is that of the drawn token."""
    chance, same = np.exp(np.minimum(log_mu, 0.0)), np.abs(d) < SAME_TOKEN
    spread = float(np.sqrt(np.sum(chance * (1 - chance))))
    return float(np.sum(same - chance)) / spread if spread and same.sum() >= LEAST_MARKED else float("nan")


def _missing_tail(d: Array, b: Array, entropies: Array) -> float:
    """Mean of t / (1 - t) e over the tokens, t = 1 - e^d: the least by which the mean of -b falls short of H.

    Tokens of a total probability t that are never drawn have -log p = H + e on average. Each has at most the
    probability t, and is less likely than the drawn token, so e is at least -log t - H, -b - H, and 0.
    """
    missing = np.clip(-np.expm1(np.minimum(d, 0.0)), 0.0, 1 - 1e-6)
    beyond = np.maximum(np.maximum(-np.log(np.maximum(missing, 1e-30)), -b) - entropies, 0.0)
    short = missing / (1 - missing) * beyond
    return float(np.mean(short[np.isfinite(short)])) if np.isfinite(short).any() else float("nan")


def _missing(evidence: TokenEvidence, logps: Array, *, sampled: bool) -> float:
    """Share of tokens without a log-prob. -inf is one of a truncated trainer, not of an engine that drew the token."""
    values = logps[evidence.completion_mask.astype(bool)]
    return float(np.mean(np.isnan(values) | np.isposinf(values) | (sampled & np.isneginf(values))))


def _copied(evidence: TokenEvidence) -> float:
    """Share of the improbable responses that another one of their group equals; 0 without token ids and groups."""
    if evidence.token_ids is None or evidence.group_ids is None:
        return 0.0
    seen = evidence.observed
    improbable = np.where(seen, evidence.sampling_per_token_logps, 0.0).sum(1) < np.log(IMPROBABLE)
    rows = [
        (group, tuple(ids[keep].tolist()))
        for group, ids, keep in zip(evidence.group_ids.tolist(), evidence.token_ids, seen, strict=True)
    ]
    counts = Counter(rows)
    copies = [counts[row] > 1 for row, rare in zip(rows, improbable, strict=True) if rare]
    return float(np.mean(copies)) if copies else 0.0


def _both_low(evidence: TokenEvidence) -> bool:
    engine, trainer = evidence.engine, evidence.trainer
    if engine is None or trainer is None or engine.dtype != trainer.dtype:
        return False
    plain = engine.quantization in (None, "none", trainer.quantization) and engine.kv_cache in (None, "auto")
    return plain and trainer.low_precision


def _of_either(evidence: TokenEvidence, b: Array) -> Array:
    """b, and where one side lacks a log-prob, the other's: what is lost may be the rare tokens, as outside a top k."""
    mu, old = evidence.sampling_per_token_logps, evidence.old_per_token_logps
    known = np.where(evidence.observed, b, np.where(np.isfinite(old), old, mu))
    return np.where(evidence.completion_mask.astype(bool), known, np.nan)


def fitting_rows(a: Array, b: Array, rows: Array) -> dict[int, tuple[int, float]]:
    """For each of some rows of a the row of b that fits it best, and its distance as a share of that in place.

    Rows are compared over the tokens that both have, which must be most of the row's.

    Args:
        a: (B, T) log-probs that may be another row's.
        b: (B, T) log-probs of all rows.
        rows: (B,) bool: rows that are looked at.
    """
    lengths = np.isfinite(b).sum(1)
    found = {}
    for row in np.flatnonzero(rows).tolist():
        own = distance(_cut(a[row] - b[row]))
        enough = max(3, OVERLAP * lengths[row])
        others = [r for r in range(len(b)) if r != row and lengths[r] >= enough]
        gaps = {r: distance(_cut(a[row] - b[r])) for r in others if np.isfinite(a[row] - b[r]).sum() >= enough}
        if gaps and own > 0:
            best = min(gaps, key=lambda r: gaps[r])
            found[row] = (best, gaps[best] / own)
    return found


def _cut(d: Array) -> Array:
    return np.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _swapped(a: Array, b: Array, rows: Array) -> float:
    """How badly rows that disagree fit another row, as a share of the distance in place; near 0 = they are its."""
    shares = [share for _, share in fitting_rows(a, b, rows).values()]
    return float(np.median(shares)) if shares else float("nan")


def _elsewhere(a: Array, b: Array, d: Array, noise: float) -> float:
    """Share of the disagreeing tokens whose a is another token's b, beyond what chance gives; NaN if chance gives most.

    Only tokens of a clear log-prob count: those near 0 are alike everywhere.
    """
    near = max(3 * noise, 1e-5)
    far = np.isfinite(d) & (np.abs(d) > 20 * near) & (a < -0.2)
    if far.sum() < LEAST_MOVED:
        return float("nan")
    known = np.sort(b[np.isfinite(b)])

    def met(values: Array) -> float:
        return float(np.mean(np.searchsorted(known, values + near) > np.searchsorted(known, values - near)))

    # The same numbers moved by some times the tolerance meet others by chance only.
    chance = float(np.mean([met(a[far] + step * near) for step in (-7, -4, 4, 7)]))
    return (met(a[far]) - chance) / (1 - chance) if chance < MOST_CHANCE else float("nan")


def _never_rare(a: Array, entropies: Array | None) -> float:
    """Share of tokens with -a above the entropy; a drawn token is, about every third time. NaN without entropies.

    The most likely token's log-prob is never below minus the entropy, whatever the distribution.
    """
    if entropies is None:
        return float("nan")
    excess = (-a - entropies)[np.isfinite(a) & np.isfinite(entropies) & (entropies > LEAST_ENTROPY)]
    return float(np.mean(excess > 1e-4)) if excess.size >= LEAST_TOKENS // 2 else float("nan")


def disagreeing_rows(d: Array, noise: float) -> Array:
    """(B,) bool: rows with a |d| far above the noise, and above a thousandth of the largest row's."""
    largest = np.nanmax(np.where(np.isnan(d), 0.0, np.abs(d)), axis=1)
    rows: Array = largest > max(20 * noise, 1e-3 * largest.max())
    return rows


def _exact_rows(d: Array) -> float:
    """Share of rows whose largest |d| is far below that of other rows. Short rows say nothing."""
    rows = np.isfinite(d).sum(1) >= EARLY_TOKENS
    if not rows.any():
        return 0.0
    largest = np.nanmax(np.abs(d[rows]), axis=1)
    return float(np.mean(largest < 0.01 * np.quantile(largest, 0.75)))


def _scaled(b: Array, d: Array) -> Array:
    """Z = d / (1 - p); NaN if p is so near 1 that this is rounding."""
    doubt = -np.expm1(np.minimum(b, 0.0))
    use = doubt > LEAST_DOUBT
    return np.where(use, d / np.where(use, doubt, 1.0), np.nan)


def _kurtosis(z: Array) -> float:
    values = z[np.isfinite(z)]
    if values.size < 4 or not values.var():
        return float("nan")
    return float(np.mean((values - values.mean()) ** 4) / values.var() ** 2)


def _top_share(size: Array, share: float) -> float:
    count = max(1, round(share * size.size))
    return float(np.sort(size)[-count:].sum() / max(size.sum(), 1e-60))


def _r_squared(y: Array, columns: Array, *, centred: bool = True) -> float:
    solution, *_ = np.linalg.lstsq(columns, y, rcond=None)
    total = np.sum((y - y.mean()) ** 2) if centred else np.sum(y**2)
    return float(1 - np.sum((y - columns @ solution) ** 2) / max(total, 1e-60))


def _temperature(evidence: TokenEvidence, b: Array, d: Array) -> tuple[float, float, float, float]:
    """R^2 and slope of d on b + H without a constant, because log p^(1/T) = b / T - log Z moves by (1/T - 1)(b + H).

    The third number is the R^2 of the engine's own log-probs a = b - d under that slope. Where d is far larger than a,
    d is nearly b, and any b fits: two policies with little in common look like a temperature. The fourth is what the
    fit leaves of the squares of d - mean(d): near 1, one number for all tokens fits as well.
    """
    missing = (float("nan"),) * 4
    if evidence.entropies is None:
        return missing
    x = b + evidence.entropies
    use = np.isfinite(x) & np.isfinite(d)
    if use.sum() < LEAST_ALIKE or not np.any(x[use]):
        return missing
    slope = float(np.sum(x[use] * d[use]) / np.sum(x[use] ** 2))
    a, left = (b - d)[use], d[use] - slope * x[use]
    own = float(1 - np.sum(left**2) / max(np.sum((a - a.mean()) ** 2), 1e-60))
    fit, rest = (_r_squared(d[use], x[use][:, None], centred=centred) for centred in (False, True))
    return fit, slope, own, 1 - rest


def _shift(a: Array, b: Array, d: Array, noise: float) -> float:
    """How badly one side fits the other moved by one to three tokens, as a share of the distance in place.

    Near 0 = it fits, 1 or more = it does not. Only tokens that disagree in place are compared.
    """
    a = np.where(np.abs(d) > 20 * noise, a, np.nan)
    shares = []
    for step in range(1, min(4, d.shape[1] if len(d) else 0)):
        early, late = slice(None, -step), slice(step, None)
        for here, there in ((early, late), (late, early)):
            gap = a[:, here] - b[:, there]
            seen = np.isfinite(gap)
            if seen.sum() >= 3:
                shares.append(distance(gap) / max(distance(np.where(seen, d[:, here], np.nan)), 1e-30))
    return min(shares, default=float("nan"))


def _means(b: Array) -> Array:
    """Every token has the mean of its row."""
    seen = np.isfinite(b)
    mean = np.where(seen, b, 0.0).sum(1, keepdims=True) / np.maximum(seen.sum(1, keepdims=True), 1)
    return np.where(seen, mean, np.nan)


def _running(b: Array) -> Array:
    return np.where(np.isfinite(b), np.nancumsum(b, axis=1), np.nan)


def _running_means(b: Array) -> Array:
    return _running(b) / np.arange(1, b.shape[1] + 1)


ROUNDED = 1e-2
"""A log-prob of a likely token may be that much above 0, by a softmax in 16 bits."""
UNITS: Mapping[str, Callable[[Array], Array]] = {
    "log-probs in base 2": lambda b: b / np.log(2),
    "log-probs in base 10": lambda b: b / np.log(10),
    "negative log-probs": np.negative,
}
REWRITTEN: Mapping[str, Callable[[Array], Array]] = {
    "running sums over the tokens": _running,
    "running means over the tokens": _running_means,
    "the mean of the response at every token": _means,
    "the sum of the response at every token": lambda b: _means(b) * np.isfinite(b).sum(1, keepdims=True),
    "probabilities in place of log-probs": np.exp,
    **UNITS,
}
"""Functions of log-probs (B, T) that were taken for log-probs."""


def _rewritten(a: Array, b: Array, d: Array, entropies: Array | None) -> tuple[float, str]:
    """The best function of b that gives a, or the entropies: share that it leaves, and its name.

    Of the distance in place, or of how far the numbers of a are apart, if that is less: beside a large distance any
    function that is near all of a, as a constant is, would leave little.
    """
    whole = max(min(distance(d), spread(a)), 1e-30)
    left = {name: distance(a - change(b)) / whole for name, change in REWRITTEN.items()}
    if entropies is not None:
        both = np.isfinite(d) & np.isfinite(entropies)
        if both.sum() >= LEAST_TOKENS:
            here = max(min(distance(d[both]), spread(a[both])), 1e-30)
            left["minus the entropies"] = distance((a + entropies)[both]) / here
    best = min(left, key=lambda name: left[name])
    return left[best], best


def _onset(d: Array, noise: float) -> float:
    """Share of disagreeing rows that differ by noise up to a token, and by order one from there on."""
    found = []
    for row in d:
        size = np.abs(row[np.isfinite(row)])
        far = np.flatnonzero(size > max(20 * noise, 0.02))
        if far.size and len(size) - far[0] >= 3:
            after, before = size[far[0] :], size[: far[0]]
            found.append(np.median(after) > 0.25 and (not before.size or before.max() < 20 * noise + 1e-4))
        else:
            found.append(False)
    return float(np.mean(found)) if found else 0.0


def _early(z: Array, tokens: int) -> float:
    first = z[:, :tokens]
    if not np.isfinite(first).any() or not np.nansum(z**2):
        return float("nan")
    return float(np.nanmean(first**2) / np.nanmean(z**2))


def _by_token(z: Array, evidence: TokenEvidence) -> float:
    """Mean product of standardised z over pairs of equal tokens of different prompt groups (rows without groups).

    Pairs within a group do not count: their contexts are alike, so any difference, also rounding, repeats. z is cut at
    three standard deviations, so that single tokens do not decide.
    """
    seen = np.isfinite(z)
    if evidence.token_ids is None or not seen.any() or not z[seen].std():
        return float("nan")
    rows = np.arange(len(z)) if evidence.group_ids is None else np.asarray(evidence.group_ids)
    values = np.clip((z[seen] - z[seen].mean()) / z[seen].std(), -3, 3)
    values = (values - values.mean()) / (values.std() or 1e-30)
    labels = np.stack([evidence.token_ids[seen], np.broadcast_to(rows[:, None], z.shape)[seen]], 1)
    # Pairs of equal tokens in different groups are all pairs of equal tokens, less those inside a group.
    pairs, total = _pair_sums(values, labels[:, 0])
    _, joint = np.unique(labels, axis=0, return_inverse=True)
    inside, inside_total = _pair_sums(values, joint.ravel())
    return (total - inside_total) / (pairs - inside) if pairs > inside else float("nan")


def _pair_sums(values: Array, labels: Array) -> tuple[float, float]:
    """Number of pairs with equal labels, and the sum of their products."""
    _, index = np.unique(labels, return_inverse=True)
    index = index.ravel()
    count = np.bincount(index)
    sums = np.bincount(index, weights=values)
    squares = np.bincount(index, weights=values**2)
    # Over i < j: 2 sum z_i z_j = (sum z)^2 - sum z^2
    return float(np.sum(count * (count - 1)) / 2), float(np.sum(sums**2 - squares) / 2)
