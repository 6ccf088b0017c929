"""Searches for the edit of a prompt that explains a row: cut, a part missing or added, another row's prompt.

Which edit it is cannot be read from log-probs, but it can be tried. One row decides: its first tokens are scored after
many edited prompts, coarse ones first, then those near the best. Another row first tries what the first one found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from trl_offpolicy.diagnosis.attribution.bench import Bench
from trl_offpolicy.diagnosis.attribution.distances import MAX_LOG_RATIO, distance
from trl_offpolicy.diagnosis.attribution.evidence import Floats

FIRST_TOKENS = 12
"""Tokens of a completion that are scored while edits are tried: those next to the prompt feel it most."""
COARSE = 8
"""Parts into which a prompt is divided to find a missing one."""
CUTS = 16
"""Cuts that are tried before they are refined."""
MOST_OTHERS = 12
"""Prompts of other rows that are tried."""
MOST_TWICE = 8
"""Tokens at the end that may stand there twice, as a generation prompt does that is added again."""
MOST_BORDERS = 8
"""Special tokens of a prompt whose neighbourhood is tried."""
STARTS = 3
"""Edits that are refined."""
FITS = 0.2
"""Share of a row's mismatch that an edit may leave."""
EXACT, HOPELESS = 1e-4, 0.9
"""Share at which an edit is the one, and share from which none that is near is tried."""
NEAR = 4
"""Tokens by which an edit that is nearly right may be off."""

Key = tuple[Any, ...]
"""An edit: its kind and its numbers."""
Ids = list[int]


@dataclass
class PromptSearch:
    """Edits of the prompts of some rows.

    Args:
        bench: the model, prompts and completions.
        plain: log-probs (B, T) after the prompts as they are.
        target: log-probs (B, T) to be explained.
        use: (B, T) bool: tokens that count.
    """

    bench: Bench
    plain: Floats
    target: Floats
    use: Any
    _specials: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        bench = self.bench
        self._specials = tuple(dict.fromkeys([*bench.begins, *bench.ends, *bench.pads]))

    # --------------------------------------------------------------------------------------------------- one row

    def left(self, row: int, logps: Floats) -> float:
        """Share of a row's mismatch that log-probs (T,) leave, over the tokens that they hold."""
        use = self.use[row, : len(logps)] & np.isfinite(logps)
        target = self.target[row, : len(logps)][use]
        whole = distance(_near(self.plain[row, : len(logps)][use] - target))
        return distance(_near(logps[use] - target)) / whole if whole else float("inf")

    def shares(self, row: int, keys: Sequence[Key]) -> dict[Key, float]:
        """Share left by each edit of a row's prompt, over the first tokens; edits that are none are left out."""
        prompt = list(self.bench.prompt_ids[row])
        made = {key: self.edited(row, key) for key in dict.fromkeys(keys)}
        tried = {key: ids for key, ids in made.items() if ids and ids != prompt}
        if not tried:
            return {}
        logps = self.bench.score_prompts(row, list(tried.values()), most=FIRST_TOKENS)
        return {key: self.left(row, logps[n]) for n, key in enumerate(tried)}

    def best(self, row: int, families: Sequence[Callable[[int], list[Key]]]) -> tuple[Key | None, float]:
        """The best edit of a row, out of the families and what is near, and the share that it leaves."""
        found: dict[Key, float] = {}
        for family in families:
            found |= self.shares(row, family(row))
            if min(found.values(), default=1.0) <= EXACT:
                break
        length = len(self.bench.prompt_ids[row])
        step = max(1, length // COARSE)
        while step >= 1 and EXACT < min(found.values(), default=0.0) < HOPELESS:
            found |= self.shares(row, [key for start in _starts(found) for key in _near_keys(start, [step], length)])
            step //= 2
        if EXACT < min(found.values(), default=0.0) < HOPELESS:  # only the very edit fits: look at all that are near
            close = range(1, NEAR + 1)
            found |= self.shares(row, [key for start in _starts(found) for key in _near_keys(start, close, length)])
        # Of edits that fit the first tokens alike, the simpler one, a cut of the beginning.
        best = min(found, key=lambda key: (max(found[key], EXACT), key[1:2] != (0,)), default=None)
        return best, 1.0 if best is None else found[best]

    # ----------------------------------------------------------------------------------------------------- edits

    def edited(self, row: int, key: Key) -> Ids:
        """The prompt of a row after an edit; empty if it cannot be made."""
        ids = list(self.bench.prompt_ids[row])
        kind, *numbers = key
        if kind == "missing":
            return ids[: numbers[0]] + ids[numbers[1] :]
        if kind == "added":
            place, token = numbers
            return [*ids[:place], token, *ids[place:]] if 0 <= place <= len(ids) else []
        if kind == "twice":
            return ids[: numbers[1]] + ids[numbers[0] :] if 0 <= numbers[0] < numbers[1] <= len(ids) else []
        if kind == "other":
            return list(numbers[0])
        if kind == "before" and row:
            return [*self.bench.prompt_ids[row - 1], *self.bench.completion_ids[row - 1], *ids]
        return []

    def ends(self, row: int) -> list[Key]:
        """Edits of the ends: a token or a few missing, doubled, or a special one added."""
        ids = list(self.bench.prompt_ids[row])
        length = len(ids)
        found: list[Key] = [("added", 0, ids[0]), ("added", length, ids[-1]), ("missing", 0, 1)]
        found += [("missing", length - count, length) for count in (1, 2, 3) if count < length]
        found += [("twice", length - count, length) for count in range(2, MOST_TWICE + 1) if count < length]
        for token in self._specials:
            found += [("added", 0, token), ("added", length, token)]
        return found

    def others(self, row: int) -> list[Key]:
        """Prompts of other rows, and the row before without a border."""
        own = tuple(self.bench.prompt_ids[row])
        distinct = dict.fromkeys(tuple(ids) for ids in self.bench.prompt_ids if tuple(ids) != own)
        return [*(("other", ids) for ids in list(distinct)[:MOST_OTHERS]), ("before",)]

    def parts(self, row: int) -> list[Key]:
        """The beginning missing, or a part: between special tokens, and of a coarse grid."""
        ids = list(self.bench.prompt_ids[row])
        length = len(ids)
        cuts = [("missing", 0, int(k)) for k in np.linspace(1, length - 1, CUTS)]
        cuts += [("missing", 0, length - keep) for keep in (8, 16, 32, 64, 128, 256, 512, 1024) if keep < length]
        places = np.linspace(0, length, COARSE + 1).astype(int).tolist()
        borders = self._borders(ids)
        spans = [*combinations(sorted(set(places)), 2), *combinations(borders, 2)]
        single = [(place, place + 1) for place in borders]
        return [*cuts, *(("missing", *span) for span in dict.fromkeys([*spans, *single]) if span != (0, length))]

    def insertions(self, row: int) -> list[Key]:
        """A token more beside a special one: one that stands beside special tokens elsewhere."""
        ids = list(self.bench.prompt_ids[row])
        borders = self._borders(ids)
        tokens = dict.fromkeys([*(ids[place] for place in borders if place < len(ids)), *self._specials])
        return [("added", place, token) for place in borders for token in list(tokens)[:6]]

    def _borders(self, ids: Ids) -> list[int]:
        """Places before and after the special tokens of a prompt, those nearest to its end first to be kept."""
        special = {*self._specials, ids[0]}
        places = {at for n, token in enumerate(ids) if token in special for at in (n, n + 1, n + 2) if at <= len(ids)}
        return sorted(sorted(places, reverse=True)[:MOST_BORDERS])


def _near(d: Floats) -> Floats:
    return np.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _starts(found: dict[Key, float]) -> list[Key]:
    """The best edits, and the beginning missing up to the end of each."""
    best = sorted(found, key=lambda key: found[key])[:STARTS]
    cuts = [("missing", 0, key[2]) for key in best if key[0] == "missing" and key[1]]
    return list(dict.fromkeys([*best, *cuts]))


def _near_keys(key: Key, steps: Iterable[int], length: int) -> Iterator[Key]:
    """Edits that differ by some numbers of tokens."""
    yield key
    for step in steps:
        if key[0] == "missing":
            for left, right in ((step, 0), (-step, 0), (0, step), (0, -step), (step, step), (-step, -step)):
                first, last = key[1] + left, key[2] + right
                if 0 <= first < last <= length and last - first < length:
                    yield ("missing", first, last)
        if key[0] == "added":
            for move in (-step, step):
                if 0 <= key[1] + move <= length:
                    yield ("added", key[1] + move, key[2])


# ------------------------------------------------------------------------------------------------------- all rows


def search_prompts(search: PromptSearch, rows: Sequence[int], worst: int, differs: Any) -> tuple[str, Floats] | None:
    """The edits that explain all rows, as ``cause:detail``, with their log-probs (B, T); None if the worst has none.

    Args:
        search: prompts and log-probs.
        rows: completions that are scored.
        worst: one of them, with most disagreement: it decides.
        differs: (B,) bool: rows that disagree; the others keep their prompt.
    """
    families = (search.ends, search.others, search.parts, search.insertions)
    key, share = search.best(worst, families)
    if key is None or share > FITS:
        return None
    keys: dict[int, Key] = {worst: key}
    for row in rows:
        if row != worst and differs[row]:
            keys[row] = _like(search, row, worst, key)
    out = np.full_like(search.plain, np.nan)
    for row in rows:
        found = search.plain[row]
        if row in keys and (prompt := search.edited(row, keys[row])):
            scored = search.bench.score_prompts(row, [prompt])[0][: out.shape[1]]
            found = np.full(out.shape[1], np.nan)
            found[: len(scored)] = scored
        out[row] = found
    return _named(search, keys), out


def _like(search: PromptSearch, row: int, worst: int, key: Key) -> Key:
    """The edit of another row: the same places from the left, from the right or in proportion, or its own best."""
    same = search.shares(row, [key, *_translated(search, row, worst, key)])
    best = min(same, key=lambda one: same[one], default=key)
    if same.get(best, 1.0) <= FITS / 4:
        return best
    own, share = search.best(row, (search.others,) if key[0] in ("other", "before") else (search.parts, search.ends))
    return own if own is not None and share < same.get(best, 1.0) else best


def _translated(search: PromptSearch, row: int, worst: int, key: Key) -> list[Key]:
    here, there = len(search.bench.prompt_ids[row]), len(search.bench.prompt_ids[worst])
    if key[0] == "missing":
        found: list[Key] = [("missing", key[1] + here - there, key[2] + here - there)]
        if key[1] == 0:
            found.append(("missing", 0, key[2] + here - there))
        found.append(("missing", round(key[1] * here / there), round(key[2] * here / there)))
        return [one for one in found if 0 <= one[1] < one[2] <= here]
    if key[0] == "added":
        return [("added", key[1] + here - there, key[2])]
    if key[0] == "twice":
        return [("twice", key[1] + here - there, key[2] + here - there)]
    return []


COUNTS = {1: "token", 2: "two tokens", 3: "three tokens"}


def _named(search: PromptSearch, keys: dict[int, Key]) -> str:
    """The edits in words."""
    prompts = {row: list(search.bench.prompt_ids[row]) for row in keys}
    kinds = {key[0] for key in keys.values()}
    if kinds == {"before"}:
        return "padding:the row before is attended (packing without a border)"
    if kinds == {"other"}:
        return f"prompt_difference:that of another group, in {len(keys)} of the rows"
    if kinds == {"twice"}:
        counts = {key[2] - key[1] for key in keys.values()}
        return f"prompt_difference:the last {' or '.join(map(str, sorted(counts)))} tokens twice"
    if kinds == {"added"}:
        return f"prompt_difference:{_added(prompts, keys, search)}"
    missing = [(key[1], key[2], len(prompts[row])) for row, key in keys.items() if key[0] == "missing"]
    if len(missing) < len(keys):
        return "prompt_difference:another edit in each row"
    return f"prompt_difference:{_missing(missing)}"


def _added(prompts: dict[int, Ids], keys: dict[int, Key], search: PromptSearch) -> str:
    tokens = {key[2] for key in keys.values()}
    front = all(key[1] == 0 for key in keys.values())
    end = all(key[1] == len(prompts[row]) for row, key in keys.items())
    if front and all(key[2] == prompts[row][0] for row, key in keys.items()):
        return "first token doubled"
    if end and all(key[2] == prompts[row][-1] for row, key in keys.items()):
        return "last token doubled"
    token = next(iter(tokens))
    what = "BOS token" if token in search.bench.begins else f"token {token}"
    where = "in front" if front else "at the end"
    return f"a {what} more {where if front or end else 'inside'}"


def _missing(spans: Sequence[tuple[int, int, int]]) -> str:
    first, last, length = spans[0]
    counts = {b - a for a, b, _ in spans}
    if all(b == n for _, b, n in spans) and len(counts) == 1:
        count = counts.pop()
        words = COUNTS.get(count, f"{count} tokens")
        return f"last {words} missing"
    if all(a == 0 for a, _, _ in spans):
        if counts == {1}:
            return "first token missing"
        if len({n - b for _, b, n in spans}) == 1:
            return f"cut to its last {length - last} tokens"
        most = "" if len(counts) == 1 else f" to {max(counts)}"
        return f"the beginning missing ({min(counts)}{most} tokens)"
    return f"tokens {first} to {last - 1} of {length} missing in a row"
