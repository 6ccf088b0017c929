"""Tests of what happens between logits and log-probs: sampling options, penalties, biases, caps; one forward for all.

Every family has one number (a temperature, a penalty, a bias). It is fitted to the log-probs that are to be explained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trl_offpolicy.diagnosis.attribution.distances import MAX_LOG_RATIO, distance
from trl_offpolicy.diagnosis.attribution.evidence import Floats
from trl_offpolicy.diagnosis.attribution.trials.interventions import minimise, round_numbers
from trl_offpolicy.engines.hf import Head, Ids, completion_logits
from trl_offpolicy.functional.truncated_sampling import Truncation, truncated_support

MAX_LOGITS = 32_000_000
"""Logits that are held at once; longer rows are cut, so that this many suffice."""
TOGETHER = (0.02, 0.7)
"""Share that temperature or truncation alone leaves, within which they are fitted together."""
GENERAL = 0.6
"""Share of the mismatch of rows that were not looked at, up to which biases found on others hold for them."""
MOST_BIASES, BETTER, FOR_EACH = 6, 0.8, 10
"""Tokens with a bias at most, the share of the mismatch that one more must go below, and places for each bias."""
AS_WELL = 1.01
"""Times the least distance that a round number may leave."""
GREEDY = "0 (greedy)"
ALONG, LEAST_OF_PART = 6, 6
"""Parts of the responses, by position, in which a temperature may differ, and tokens that each part must have."""
APART, HALF = 1.02, 0.5
"""Ratio from which temperatures differ, and share of what a single one leaves up to which they are several."""
CANDIDATES = 20
"""Tokens tested for a bias, the best of a linear fit over the whole vocabulary."""


@dataclass(frozen=True)
class Logits:
    """The logits of N tokens.

    Args:
        values: (N, V) float32.
        ids: (N,) the token at each position.
        rows: (N,) row of each token.
        places: (N,) its position in the completion.
        contexts: (N,) the tokens before it: prompt, and completion so far.
        head: what the plain scoring makes of the logits.
    """

    values: Tensor
    ids: Tensor
    rows: Tensor
    places: Tensor
    contexts: Sequence[tuple[Sequence[int], Sequence[int]]]
    head: Head

    def chosen(self, logits: Tensor) -> Tensor:
        """(N,) log-probs of the tokens under changed logits."""
        return self.under(self.head, logits)

    def under(self, head: Head, logits: Tensor | None = None) -> Tensor:
        """(N,) log-probs of the tokens under another head."""
        values = self.values if logits is None else logits
        if not head.truncation:  # no (N, V) log-softmax for one column
            scaled = values / head.temperature
            return scaled.gather(1, self.ids[:, None]).squeeze(1) - scaled.logsumexp(1)
        return head.logps(values).gather(1, self.ids[:, None]).squeeze(1)

    @cached_property
    def plain(self) -> Tensor:
        """(N,) log-probs under the plain head."""
        return self.under(self.head)

    def counts(self, *, prompts: bool) -> Tensor:
        """(N, V): how often each token of the vocabulary occurs before the position; prompts count if asked for."""
        found = torch.zeros_like(self.values)
        for row, (prompt, before) in enumerate(self.contexts):
            seen = torch.tensor([*(prompt if prompts else ()), *before], dtype=torch.long)
            found[row].index_add_(0, seen, torch.ones(len(seen)))
        return found


@torch.no_grad()
def logits_of(model: Any, prompt_ids: Ids, completion_ids: Ids, rows: Sequence[int], head: Head) -> Logits:
    """The logits of the completions ``rows``, cut to :data:`MAX_LOGITS`."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    most = max(1, MAX_LOGITS // vocabulary // max(len(rows), 1))
    prompts, completions = [prompt_ids[row] for row in rows], [completion_ids[row][:most] for row in rows]
    values, ids, at, places, contexts = [], [], [], [], []
    for first, logits, block, mask in completion_logits(model, prompts, completions):
        row, place = torch.nonzero(mask, as_tuple=True)
        values.append(logits[mask].float())
        ids.append(block[mask])
        at.append(torch.tensor([rows[first + int(one)] for one in row]))
        places.append(place)
        contexts += [
            (prompts[first + int(r)], completions[first + int(r)][: int(t)]) for r, t in zip(row, place, strict=True)
        ]
    return Logits(torch.cat(values), torch.cat(ids), torch.cat(at), torch.cat(places), contexts, head)


def _gap(logps: Any, target: Floats) -> float:
    """:func:`distance` between log-probs; a token of probability 0 counts as a difference of 20 nats."""
    return distance(np.clip(np.asarray(logps, np.float64) - target, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def sampling_tests(logits: Logits, target: Floats, ranks: Floats, top_logps: Floats) -> dict[str, Tensor]:
    """Log-probs (N,) under the best temperature, truncation and both; arguments as for :func:`truncation_tests`."""
    found = {
        **_temperature(logits, target), **_raw(logits), **_greedy(logits, ranks),
        **truncation_tests(logits, target, ranks, top_logps),
    }  # fmt: skip
    left = min(_gap(logps.numpy(), target) for logps in found.values())
    left /= max(_gap(logits.plain.numpy(), target), 1e-30)
    if TOGETHER[0] < left < TOGETHER[1]:
        found |= both_tests(logits, target, ranks)
    if TOGETHER[0] < left:
        found |= _temperatures(logits, target)
    return found


def fitted_sampling(logits: Logits, target: Floats) -> dict[str, Tensor]:
    """Log-probs (N,) under the temperature that fits best, the truncation that does, and both, by ``cause:detail``."""
    every = torch.arange(len(logits.ids))
    probs = logits.head.logps(logits.values)
    ranks = (probs > probs[every, logits.ids][:, None]).sum(1).double().numpy()
    top = probs.max(1).values.double().numpy()
    cuts = truncation_tests(logits, target, ranks, top)
    best = min(cuts, key=lambda name: _gap(cuts[name].numpy(), target), default=None)
    found = _temperature(logits, target) | ({} if best is None else {best: cuts[best]})
    left = min(_gap(logps.numpy(), target) for logps in found.values())
    return found | (
        both_tests(logits, target, ranks) if left > TOGETHER[0] * _gap(logits.plain.numpy(), target) else {}
    )


def processor_tests(logits: Logits, target: Floats, *, stop_ids: Iterable[int] = ()) -> dict[str, Tensor]:
    """Log-probs (N,) under the best value of every other family, by ``cause:detail``.

    Args:
        logits: of the tokens under plain scoring.
        target: (N,) the log-probs to be explained, nats; finite.
        stop_ids: tokens that end a completion, which may be banned.
    """
    found: dict[str, Tensor] = {}
    found |= _soft_cap(logits, target)
    found |= _penalties(logits, target)
    found |= _general_biases(logits, target, tuple(stop_ids))
    found |= _bans(logits, target, tuple(stop_ids))
    found |= _extra_mass(logits, target)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found[f"precision:logits in {name}"] = logits.chosen(logits.values.to(dtype).float())
        found[f"precision:log-probs stored in {name}"] = logits.plain.to(dtype).float()
    return found


def _fitted(
    make: Callable[[float], Tensor], target: Floats, grid: Sequence[float], *, neutral: float | None = 0.0
) -> tuple[float, Tensor]:
    value = minimise(lambda x: _gap(make(x).numpy(), target), grid, neutral=neutral)
    return value, make(value)


def _temperature(logits: Logits, target: Floats) -> dict[str, Tensor]:
    best = _fitted_temperature(logits, target)
    return {f"temperature:{best:.6g}": logits.under(Head(best, logits.head.truncation))}


def _fitted_temperature(logits: Logits, target: Floats) -> float:
    def at(log_t: float) -> Tensor:
        return logits.under(Head(float(np.exp(log_t)), logits.head.truncation))

    now = float(np.log(logits.head.temperature))
    grid = [now + step for step in (-1.6, -0.7, -0.25, -0.05, -0.003, 0.0, 0.003, 0.05, 0.25, 0.7, 1.6)]
    value, _ = _fitted(at, target, grid, neutral=now)
    return _rounded(lambda t: _gap(at(float(np.log(t))).numpy(), target), float(np.exp(value)))


def _rounded(loss: Callable[[float], float], value: float) -> float:
    """The number with the fewest digits that fits as well: settings are round numbers."""
    enough = AS_WELL * loss(value)
    return next((one for one in round_numbers(value) if loss(one) <= enough), value)


def _raw(logits: Logits) -> dict[str, Tensor]:
    """Log-probs before temperature and truncation (vLLM's ``logprobs_mode=raw_logprobs``)."""
    if logits.head == Head():
        return {}
    return {"temperature:log-probs before temperature and truncation": logits.under(Head())}


def _greedy(logits: Logits, ranks: Floats) -> dict[str, Tensor]:
    """Log-probs of an engine at temperature 0: the most likely token is certain."""
    return {f"temperature:{GREEDY}": torch.where(torch.from_numpy(ranks) == 0, 0.0, -torch.inf)}


def _temperatures(logits: Logits, target: Floats) -> dict[str, Tensor]:
    """Temperatures that differ between responses, or along them: one for each response, or for each part of them."""
    rows, places, alone = logits.rows.numpy(), logits.places.numpy(), _fitted_temperature(logits, target)
    whole = _gap(logits.under(Head(alone, logits.head.truncation)).numpy(), target)
    borders = np.quantile(places, np.arange(1, ALONG) / ALONG)
    parts = {"in each response": rows, "in each part of the responses": np.searchsorted(borders, places)}
    found: dict[str, Tensor] = {}
    for words, part in parts.items():
        counts = np.unique(part, return_counts=True)[1]
        if len(counts) < 2 or counts.min() < LEAST_OF_PART:
            continue
        logps, values = logits.plain.clone(), []
        for one in np.unique(part):
            here = torch.from_numpy(part == one)
            some = replace(logits, values=logits.values[here], ids=logits.ids[here])
            values.append(_fitted_temperature(some, target[part == one]))
            logps[here] = some.under(Head(values[-1], some.head.truncation))
        if max(values) > APART * min(values) and _gap(logps.numpy(), target) < HALF * whole:
            found[f"temperature:another {words}, {min(values):.3g} to {max(values):.3g}"] = logps
    return found


def _soft_cap(logits: Logits, target: Floats) -> dict[str, Tensor]:
    at = lambda log_cap: logits.chosen(_capped(logits.values, float(np.exp(log_cap))))  # noqa: E731
    value, logps = _fitted(at, target, [float(np.log(cap)) for cap in CAPS], neutral=None)
    return {f"model_config:logits soft-capped at {np.exp(value):.3g}": logps}


CAPS = (5, 10, 20, 30, 50, 100, 300)


def _capped(values: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(values / cap)


def _penalties(logits: Logits, target: Floats) -> dict[str, Tensor]:
    """Repetition (prompt and completion), frequency and presence penalties (completion), as vLLM applies them."""
    seen, counts = logits.counts(prompts=True) > 0, logits.counts(prompts=False)
    values = logits.values

    def repetition(r: float) -> Tensor:
        return logits.chosen(torch.where(seen, torch.where(values > 0, values / r, values * r), values))

    added = (-0.3, 0.0, 0.05, 0.2, 0.6, 2.0)
    families: dict[str, tuple[Callable[[float], Tensor], Sequence[float]]] = {
        "repetition penalty": (repetition, (0.9, 1.0, 1.03, 1.1, 1.3, 2.0)),
        "frequency penalty": (lambda f: logits.chosen(values - f * counts), added),
        "presence penalty": (lambda p: logits.chosen(values - p * (counts > 0)), added),
    }  # fmt: skip
    found = {}
    for name, (make, grid) in families.items():
        value, logps = _fitted(make, target, grid, neutral=1.0 if 1.0 in grid else 0.0)
        found[f"logit_processors:{name} {value:.3g}"] = logps
    return found


def _general_biases(logits: Logits, target: Floats, stop_ids: tuple[int, ...]) -> dict[str, Tensor]:
    """Biases that hold for rows on which they were not fitted.

    A few biases have enough freedom to fit any mismatch of a few large tokens. A real one also moves the log-probs of
    other tokens, in every row. So biases of one half of the prompts must explain the other half.
    """
    found = _biases(logits, target, stop_ids)
    if not found:
        return found
    prompts = [tuple(prompt) for prompt, _ in logits.contexts]
    labels: list[Any] = prompts if len(set(prompts)) > 1 else logits.rows.tolist()
    known = list(dict.fromkeys(labels))
    halves = [np.array([known.index(label) % 2 == half for label in labels]) for half in (0, 1)]
    if not halves[1].any():
        return found
    held = [_held_out(logits, target, stop_ids, here, there) for here, there in (halves, halves[::-1])]
    return found if max(held) < GENERAL else {}


def _held_out(logits: Logits, target: Floats, stop_ids: tuple[int, ...], here: Any, there: Any) -> float:
    """Share of the mismatch of the tokens ``there`` that the biases of the tokens ``here`` leave."""
    part = replace(logits, values=logits.values[here], ids=logits.ids[here])
    other = replace(logits, values=logits.values[there], ids=logits.ids[there])
    whole = _gap(other.plain.numpy(), target[there])
    if not whole:
        return 0.0
    values = _bias_values(part, target[here], stop_ids)
    return _gap(_under_biases(other, values).numpy(), target[there]) / whole


def _bias_values(logits: Logits, target: Floats, stop_ids: tuple[int, ...]) -> dict[int, float]:
    """The biases that fit, by token."""
    fits = list(_bias_fits(logits, target, stop_ids))
    return fits[-1][0] if fits else {}


def _bias_fits(logits: Logits, target: Floats, stop_ids: tuple[int, ...]) -> Iterator[tuple[dict[int, float], Tensor]]:
    """Biases by token and the log-probs (N,) under them: one token's, then one more while that helps."""
    probs, logps = logits.head.logps(logits.values).exp(), logits.plain
    biases: dict[int, float] = {}
    for _ in range(max(1, min(MOST_BIASES, len(target) // FOR_EACH))):
        before = _gap(logps.numpy(), target)
        token, value, changed, probs = _bias(probs, logps, logits.ids, target, stop_ids)
        if _gap(changed.numpy(), target) > BETTER * before:
            return
        logps, biases = changed, {**biases, token: biases.get(token, 0.0) + value}
        yield biases, logps


def _under_biases(logits: Logits, values: Mapping[int, float]) -> Tensor:
    changed = logits.values.clone()
    for token, value in values.items():
        changed[:, token] += value * logits.head.temperature
    return logits.chosen(changed)


def _bans(logits: Logits, target: Floats, stop_ids: tuple[int, ...]) -> dict[str, Tensor]:
    """Tokens that are banned in some places: the end before a number of tokens, and n-grams that were there before."""
    found: dict[str, Tensor] = {}
    stops = [token for token in stop_ids if token < logits.values.shape[1]]
    if stops:
        without = logits.values.clone()
        without[:, stops] = -torch.inf
        without[torch.arange(len(without)), logits.ids] = logits.values[torch.arange(len(without)), logits.ids]
        banned = logits.chosen(without)
        counts = range(1, int(logits.places.max()) + 1)
        tried = {n: torch.where(logits.places < n, banned, logits.plain) for n in counts}
        if tried:
            best = min(tried, key=lambda n: _gap(tried[n].numpy(), target))
            found[f"logit_processors:no end before token {best} (min_tokens)"] = tried[best]
    for size in (2, 3, 4):
        banned_ids = [_repeats([*prompt, *before], size) for prompt, before in logits.contexts]
        if not any(banned_ids):
            continue
        values = logits.values.clone()
        for row, ids in enumerate(banned_ids):
            values[row, [one for one in ids if one != int(logits.ids[row])]] = -torch.inf
        found[f"logit_processors:no repeated {size}-gram"] = logits.chosen(values)
    return found


def _repeats(ids: Sequence[int], size: int) -> list[int]:
    """Tokens that would end a sequence of ``size`` tokens that was there before.

    Example:
        >>> _repeats([5, 6, 7, 5, 6], 3)
        [7]
    """
    last = list(ids[len(ids) - size + 1 :])
    return sorted({ids[n + size - 1] for n in range(len(ids) - size + 1) if list(ids[n : n + size - 1]) == last})


def _biases(logits: Logits, target: Floats, stop_ids: tuple[int, ...]) -> dict[str, Tensor]:
    """Biases on a few tokens, or bans, one after the other while they help."""
    return {
        f"logit_processors:{', '.join(_bias_text(*one, logits.ids, stop_ids) for one in biases.items())}": logps
        for biases, logps in _bias_fits(logits, target, stop_ids)
    }


def _bias(
    probs: Tensor, logps: Tensor, ids: Tensor, target: Floats, stop_ids: tuple[int, ...]
) -> tuple[int, float, Tensor, Tensor]:
    """The bias on one token that fits best: token, bias, the log-probs (N,) and the probabilities (N, V) under it.

    A bias moves the log-prob of other tokens by -log(1 + (e^bias - 1) p(token)). To first order the change is bias *
    (1[token chosen] - p(token)). The tokens of the best linear fit are tested exactly.
    """
    change = torch.from_numpy(target).float() - logps
    count = probs.shape[1]
    along = torch.zeros(count).index_add_(0, ids, change) - probs.T @ change
    own = probs.gather(1, ids[:, None]).squeeze(1)
    square = probs.square().sum(0) + torch.zeros(count).index_add_(0, ids, 1 - 2 * own)
    fit = along.square() / square.clamp(min=1e-9)
    best: tuple[float, int, float, Tensor] | None = None
    for token in {*fit.topk(min(CANDIDATES, count)).indices.tolist(), *stop_ids}:
        p, is_chosen = probs[:, token], ids == token

        def biased(bias: float, p: Tensor = p, is_chosen: Tensor = is_chosen) -> Tensor:
            return logps + bias * is_chosen - torch.log1p(np.expm1(bias) * p)

        value, changed = _fitted(biased, target, (-20.0, -5.0, -2.0, -0.5, 0.0, 0.5, 2.0, 5.0, 10.0))
        left = _gap(changed.numpy(), target)
        if best is None or left < best[0]:
            best = (left, token, value, changed)
    assert best is not None
    _, token, value, changed = best
    scale = 1 + np.expm1(value) * probs[:, token]
    probs = probs / scale[:, None]
    probs[:, token] *= float(np.exp(value))
    return token, value, changed, probs


def _bias_text(token: int, value: float, ids: Tensor, stop_ids: tuple[int, ...]) -> str:
    text = f"bias {value:.3g} on token {token}"
    if value < -10 and not (ids == token).any():
        text = f"token {token} banned"
    if token in stop_ids:
        text += " (an end of sequence: min_tokens or ignore_eos?)"
    return text


def _extra_mass(logits: Logits, target: Floats) -> dict[str, Tensor]:
    """Padding of the vocabulary counted in the softmax: the normaliser e^z becomes e^z + m for all tokens."""
    log_z = (logits.values / logits.head.temperature).logsumexp(1)
    middle = float(log_z.median())
    at = lambda log_m: logits.plain - torch.nn.functional.softplus(log_m - log_z)  # noqa: E731
    value, logps = _fitted(at, target, [middle + step for step in (-12, -8, -5, -3, -1.5, 0, 1.5, 3)], neutral=None)
    return {f"model_config:logits of {np.exp(value):.3g} more in the softmax (padding of the vocabulary?)": logps}


def both_tests(logits: Logits, target: Floats, ranks: Floats) -> dict[str, Tensor]:
    """Log-probs (N,) under a temperature together with top-p, top-k or both; arguments as for :func:`truncation_tests`.

    For each truncation the kept tokens are found at the temperature that fits alone, and on them the temperature is
    fitted again. For the best ones this is repeated, because other tokens are kept at another temperature.
    """
    alone = _fitted_temperature(logits, target)
    rank = int(ranks.max()) + 1
    sizes = [0, *(_not_below(rank, TOP_KS)[:MOST_SIZES] if rank < 1000 else [])]
    cuts = [Truncation(top_p=p, top_k=k) for p in (1.0, *COMMON_TOP_PS) for k in sizes if p < 1 or k]
    tried = [(*_on_kept(logits, target, cut, alone), cut) for cut in cuts]
    again = [
        (*_on_kept(logits, target, cut, temperature), cut)
        for _, temperature, cut in sorted(tried, key=lambda one: one[0])[:NEAREST]
    ]
    _, temperature, cut = min([*tried, *again], key=lambda one: one[0])
    exact = _rounded(lambda t: _gap(logits.under(Head(t, cut)).numpy(), target), temperature)
    options = [f"top_p {cut.top_p:g}"] * (cut.top_p < 1) + [f"top_k {cut.top_k}"] * (cut.top_k > 0)
    words = f"truncated_sampling:{', '.join(options)}"
    name = words if exact == logits.head.temperature else f"temperature:{exact:.4g} + {words}"
    return {name: logits.under(Head(exact, cut))}


def _on_kept(logits: Logits, target: Floats, cut: Truncation, temperature: float) -> tuple[float, float]:
    """The distance that the best temperature leaves on the tokens that are kept at ``temperature``, and its value."""
    scaled = logits.values / temperature
    kept = truncated_support(scaled, cut).weights(scaled) > 0
    kept[torch.arange(len(kept)), logits.ids] = True  # a token that is cut by a hair says nothing
    on_kept = replace(logits, values=logits.values.masked_fill(~kept, -torch.inf), head=Head())
    best = _fitted_temperature(on_kept, target)
    return _gap(on_kept.under(Head(best)).numpy(), target), best


COMMON_TOP_PS, MOST_SIZES = (0.5, 0.8, 0.9, 0.95, 0.98), 4
"""Top-p that is tried together with a temperature, and sizes of top-k."""
TOP_PS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995)
TOP_KS = (2, 3, 4, 5, 8, 10, 16, 20, 25, 30, 32, 40, 50, 64, 80, 100, 128, 200, 256, 500)
MIN_PS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Usual values."""
NEAREST = 3
"""Usual values that are tried next to a bound."""


def _not_above(bound: float, usual: Sequence[float], *, exact: Sequence[float]) -> list[float]:
    """The bound, the usual values next below it, and the next above: engines differ by one token at the edge.

    Example:
        >>> _not_above(0.913, (0.8, 0.85, 0.9, 0.95), exact=(0.91, 0.913))
        [0.91, 0.913, 0.9, 0.85, 0.8, 0.95]
    """
    below = [value for value in sorted(usual, reverse=True) if value <= bound][:NEAREST]
    above = [value for value in sorted(usual) if value > bound][:1]
    return [value for value in dict.fromkeys([*exact, *below, *above]) if 0 < value < 1]


def _not_below(bound: int, usual: Sequence[int]) -> list[int]:
    """The bound, the next number, and the usual values next above.

    Example:
        >>> _not_below(16, (16, 20, 25, 30, 32))
        [16, 17, 20, 25, 30]
    """
    return list(dict.fromkeys([bound, bound + 1, *[value for value in usual if value > bound + 1][:NEAREST]]))


def truncation_tests(logits: Logits, target: Floats, ranks: Floats, top_logps: Floats) -> dict[str, Tensor]:
    """Log-probs (N,) under the top-p, top-k and min-p that fit, by ``cause:detail``.

    Under a truncation the change of a log-prob is the log of the kept mass, and top-p keeps a mass of at least its
    value. Top-k samples no token of rank k or more, min-p none with less than min-p times the largest probability. So
    the tokens at hand give a bound, and usual values near it are tried as well: few tokens may not reach it.

    Args:
        logits: of the tokens under plain scoring.
        target: (N,) the log-probs to be explained, nats.
        ranks: (N,) how many tokens are more likely.
        top_logps: (N,) log-prob of the most likely token.
    """
    plain = logits.plain.double().numpy()
    mass = float(np.exp(np.clip(plain - target, -5, 0)).min())
    if mass >= 1 - 1e-6:
        return {}
    temperature, found = logits.head.temperature, {}
    cuts = [(f"top_p {p:.4g}", Truncation(top_p=p)) for p in _not_above(mass, TOP_PS, exact=(round(mass, 2), mass))]
    if (rank := int(ranks.max()) + 1) < 1000:
        cuts += [(f"top_k {k}", Truncation(top_k=k)) for k in _not_below(rank, TOP_KS)]
    smallest = float(np.exp((plain - top_logps).min()))
    cuts += [
        (f"min_p {p:.4g}", Truncation(min_p=p))
        for p in _not_above(smallest, MIN_PS, exact=(round(smallest, 2), smallest)) if p > 1e-3
    ]  # fmt: skip
    for name, cut in cuts:
        found[f"truncated_sampling:{name}"] = logits.under(Head(temperature, cut))
    return found | _without_the_crossing_one(logits, mass)


def _without_the_crossing_one(logits: Logits, mass: float) -> dict[str, Tensor]:
    """Top-p of kernels that leave out the token with which the mass is reached; the most likely one stays."""
    ranked, order = (logits.values / logits.head.temperature).softmax(1).sort(1, descending=True)
    reached = ranked.cumsum(1)
    place = (order == logits.ids[:, None]).int().argmax(1)
    found = {}
    for p in (p for p in TOP_PS if p >= mass):
        kept = reached <= p
        kept[:, 0] = True
        left = torch.log((ranked * kept).sum(1))
        inside = kept.gather(1, place[:, None])[:, 0]
        found[f"truncated_sampling:top_p {p:g} without the token that reaches it"] = torch.where(
            inside, logits.plain - left, -torch.inf
        )
    return found
