"""The one check of what an engine returned: is each reply one that can be trained on?

A reply cannot be used if it is empty or missing, holds an id that the model does not know, or a log-prob above 0. It is
asked for again (``retry``), or leaves the batch (``drop``), or ends the run (``raise``). Log-probs are lists of the
engine here, so nothing waits for the device.

A rank that finds such a reply goes on with a filler until all ranks have their replies. Then they agree: either all of
them raise, or all of them go on without the same rows. So a rank that alone has a bad reply leaves no other waiting.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from trl_offpolicy.checks import check_choice
from trl_offpolicy.engines.engine import EngineError, Rollouts
from trl_offpolicy.functional.collective import gather_objects
from trl_offpolicy.functional.diagnostics import fraction
from trl_offpolicy.functional.moments import Layout, moments
from trl_offpolicy.stats import Group, Stats

logger = logging.getLogger(__name__)

OnBadRollout = Literal["raise", "drop", "retry"]
RETRIES = 2
"""How often a reply is asked for again."""
LARGEST_LOGP = 0.01
"""Nats. A log-prob is at most 0; float32 rounds a logit of 1e4 by 1e-3, so a little above is rounding."""
SCREEN_METRICS = ("unusable_fraction", "retried_fraction")
_COUNTS = Layout(sums=("bad", "asked", "dropped", "retried"))
_SHOWN = 60
"""Characters of a prompt in a message."""
_LISTED = 3
"""Replies that a message describes."""

Columns = dict[str, list[Any]]
"""Fields of some replies by name, each with one entry per reply."""


class RolloutError(EngineError):
    """Replies of the engine cannot be trained on, and the run must not go on without them."""


class Unusable(float):
    """NaN in the place of a log-prob: the reply that holds it cannot be used, for ``reason``.

    It stays with its row on the way through a loop of tools, whoever runs that loop.

    Example:
        >>> Unusable("it is empty"), Unusable("it is empty").reason
        (nan, 'it is empty')
    """

    reason: str

    def __new__(cls, reason: str) -> Unusable:
        """The mark of a reply that cannot be used for ``reason``."""
        made = super().__new__(cls, math.nan)
        made.reason = reason
        return made

    def __reduce__(self) -> tuple[type[Unusable], tuple[str]]:
        return Unusable, (self.reason,)


def check_on_bad_rollout(value: Any) -> None:
    """Raise unless ``value`` is an :data:`OnBadRollout`.

    Raises:
        ValueError: it is not.
    """
    check_choice("on_bad_rollout", value, get_args(OnBadRollout))


def fault_of(ids: Sequence[int], logps: Sequence[float | None] | None, *, vocabulary: int | None) -> str | None:
    """Why a reply cannot be used, as the end of a sentence about it; None = it can.

    Log-probs that are missing or not finite are no fault of a reply: the correction's ``nonfinite`` says what they do.

    Args:
        ids: sampled tokens.
        logps: log-prob of each, nats; None where the engine has none.
        vocabulary: number of ids that the model knows; None = any id is known.

    Example:
        >>> fault_of([5, 7], [-0.1, 3.0], vocabulary=10)
        'the log-prob of its token 1 is +3, above 0'
    """
    if not ids:
        return "it is empty"
    if min(ids) < 0 or (vocabulary is not None and max(ids) >= vocabulary):
        at = next(i for i, token in enumerate(ids) if token < 0 or (vocabulary is not None and token >= vocabulary))
        size = "" if vocabulary is None else f" of {vocabulary} ids"
        return f"its token {at} is {ids[at]}, outside the vocabulary{size}"
    if logps is None:
        return None
    if len(logps) != len(ids):
        return f"it has {len(logps)} log-probs for {len(ids)} tokens"
    for at, value in enumerate(logps):
        if value is not None and value > LARGEST_LOGP:
            return f"the log-prob of its token {at} is {value:+g}, above 0"
    return None


class _Tally(NamedTuple):
    """What one rank found in a generation batch.

    Args:
        logps: any was finite; None = there is none to look at.
        masked: it has a mask of tokens that the engine did not sample.
    """

    rows: int
    reasons: dict[int, str]
    tokens: int
    retried: int
    logps: bool | None
    masked: bool


@dataclass(frozen=True)
class Screened:
    """What all ranks agreed on for a generation batch.

    Args:
        rows: numbers of the dropped rows, counted over the ranks in their order.
        here: numbers of those of this rank.
        tokens: trainable tokens that they held, over all ranks.
        counts: (bad, asked, dropped, retried) replies of this rank.
        masked: some rank has a mask of tokens that its engine did not sample.
    """

    rows: tuple[int, ...] = ()
    here: tuple[int, ...] = ()
    tokens: int = 0
    counts: tuple[int, int, int, int] = (0, 0, 0, 0)
    masked: bool = False

    def mask_of(self, completions: Sequence[Sequence[int]], mask: list[list[int]] | None) -> list[list[int]] | None:
        """``mask``; of all tokens if only other ranks have one, so that all ranks measure the same groups."""
        return [[1] * len(row) for row in completions] if self.masked and mask is None else mask

    def without_rewards(self, rewards: Tensor, *, local: bool = False) -> Tensor:
        """Rewards (N, K) with NaN in the dropped rows, so that no baseline counts them.

        Args:
            rewards: rewards by function.
            local: True = the rows are those of this rank.
        """
        return _filled(rewards, self.here if local else self.rows, math.nan)

    def without_tokens(self, mask: Tensor) -> Tensor:
        """A mask (B, T) of this rank's rows with 0 in the dropped ones: they leave loss, metrics and records."""
        return _filled(mask, self.here, 0)

    def stats(self, device: torch.device) -> Stats:
        """``rollout/unusable_fraction`` and ``rollout/retried_fraction``; logged only if a reply was bad."""
        counts = [torch.tensor(float(count), device=device) for count in self.counts]
        shares = {"unusable_fraction": fraction("dropped", "asked"), "retried_fraction": fraction("retried", "asked")}
        return Stats({"rollout#screen": Group(moments(_COUNTS, counts), shares, sparse=True)})


def _filled(values: Tensor, rows: Sequence[int], value: float) -> Tensor:
    if not rows:
        return values
    values = values.clone()
    values[torch.tensor(rows, device=values.device)] = value
    return values


_MAY_BE_UNKNOWN = ("routed_experts", "sampling_mask")
"""Columns of rollouts that need not be known of every reply."""


class Screen:
    """Checks the replies of one trainer.

    Args:
        mode: what happens to a reply that cannot be used: an :data:`OnBadRollout`.
        vocabulary: number of ids that the model knows; None = not checked.
        filler: the id that stands in the place of a dropped reply. Nothing learns from it.
        decode: turns ids into text, for messages.

    Raises:
        ValueError: ``mode`` is none of these.
    """

    def __init__(
        self, mode: str, *, vocabulary: int | None, filler: int, decode: Callable[[list[int]], str] = str
    ) -> None:
        check_on_bad_rollout(mode)
        self.mode, self.vocabulary, self.filler, self._decode = mode, vocabulary, filler, decode
        self._retried = 0
        self._whole: str | None = None  # why nothing of this rank's batch can be used
        self.scored_by_environments = False
        """Whether some environment gives rewards; the same on all ranks."""
        self._asked = 0  # rewards of environments
        self._unscored: list[str] = []  # why some of them were not given
        self._resetting = True
        self._resets = 0
        self._marked: dict[int, str] = {}  # rows that cannot be used, whatever the engine says

    # ------------------------------------------------------------------------------------------------------ replies

    def replies(
        self,
        columns: Columns,
        prompts: Sequence[Sequence[int]],
        fill: Callable[[int, str], Mapping[str, Any]],
        *,
        again: Callable[[list[int]], Columns] | None = None,
        together: bool = False,
    ) -> Columns:
        """The replies, with those that cannot be used asked for again or replaced by fillers.

        Args:
            columns: the replies: ``completion_ids``, ``logps`` (nats; or absent), and others that belong to them.
            prompts: ids of the prompt of each.
            fill: ``fill(row, reason)`` returns the fields of a filler, which holds ``reason`` in its log-prob. Fields
                that the replies do not have are ignored, here and in what ``again`` returns.
            again: samples the replies with these numbers again; None = that cannot be done.
            together: whether ``again`` must be called by all ranks if any calls it.
        """
        columns = {name: list(values) for name, values in columns.items()}
        faults = self._faults(columns, range(len(prompts)))
        for _ in range(RETRIES if self.mode == "retry" and again is not None else 0):
            if not (any(gather_objects(bool(faults))) if together else faults):
                break
            assert again is not None
            rows = sorted(faults)
            fresh = again(rows)
            self._retried += len(rows)
            # What the first reply had and this one lacks belongs to other tokens, and is not known of these.
            lost = {name: [None] * len(rows) for name in _MAY_BE_UNKNOWN if name not in fresh}
            for name, values in {**lost, **fresh}.items():
                for row, value in zip(rows, values, strict=True) if name in columns else ():
                    columns[name][row] = value
            faults = self._faults(columns, rows)
        for row, why in faults.items():
            filler = fill(row, f"the reply to {self._shown(prompts[row])} cannot be used: {why}")
            for name in columns.keys() & filler.keys():
                columns[name][row] = filler[name]
        return columns

    def _faults(self, columns: Columns, rows: Sequence[int]) -> dict[int, str]:
        ids, logps = columns["completion_ids"], columns.get("logps")
        found = {
            row: fault_of(ids[row], None if logps is None else logps[row], vocabulary=self.vocabulary) for row in rows
        }
        return {row: why for row, why in found.items() if why is not None}

    def _shown(self, prompt: Sequence[int]) -> str:
        text = self._decode(list(prompt))
        return repr(text if len(text) <= _SHOWN else f"...{text[-_SHOWN:]}")

    def rollouts(
        self,
        rollouts: Rollouts,
        prompts: Sequence[Sequence[int]],
        *,
        again: Callable[[list[int]], Rollouts] | None = None,
    ) -> Rollouts:
        """:meth:`replies` of an engine of the engine layer.

        Args:
            rollouts: what it returned.
            prompts: ids of the prompts, one for each completion that was asked for.
            again: returns one reply for each of the prompts with these numbers.
        """
        if len(rollouts) != len(prompts):
            rollouts = self._aligned(rollouts, prompts)
        columns = _columns(rollouts)

        def fill(row: int, reason: str) -> dict[str, Any]:
            if rollouts.sampling_per_token_logps is None:
                self._whole = self._whole or reason
            return {
                "completion_ids": [self.filler],
                "logps": [Unusable(reason)],
                "policy_versions": [_first(rollouts.policy_versions)],
                "finish_reasons": "unusable",
                "routed_experts": _of_prompt(columns.get("routed_experts"), row, len(prompts[row])),
                "sampling_mask": [[self.filler]],
                "tool_mask": [1],
                "token_rewards": [0.0],
            }

        def once_more(rows: list[int]) -> Columns:
            assert again is not None
            fresh = again(rows)
            return _columns(fresh if len(fresh) == len(rows) else self._aligned(fresh, [prompts[i] for i in rows]))

        screened = self.replies(columns, prompts, fill, again=None if again is None else once_more)
        if "logps" in screened:
            screened["sampling_per_token_logps"] = screened.pop("logps")
        return replace(rollouts, **screened)

    def _aligned(self, rollouts: Rollouts, prompts: Sequence[Sequence[int]]) -> Rollouts:
        """Rollouts with an empty reply where one is missing, by their prompts; all are empty if these do not tell."""
        columns, found = _columns(rollouts), iter(range(len(rollouts)))
        at, places = next(found, None), []
        for prompt in prompts:
            fits = at is not None and list(rollouts.prompt_ids[at]) == list(prompt)
            places.append(at if fits else None)
            at = next(found, None) if fits else at
        if at is not None:  # more than asked for, or other prompts
            self._whole = f"the engine returned {len(rollouts)} completions where {len(prompts)} were asked for"
            places = [None] * len(prompts)
        empty: dict[str, Any] = {"finish_reasons": "missing", "routed_experts": None}
        rows = {
            name: [empty.get(name, []) if i is None else values[i] for i in places] for name, values in columns.items()
        }
        rows["prompt_ids"] = [list(prompt) for prompt in prompts]
        if "logps" in rows:
            rows["sampling_per_token_logps"] = rows.pop("logps")
        return replace(rollouts, **rows)

    def fail(self, reason: str) -> None:
        """Have all ranks raise when they agree: nothing of this rank's batch can be used."""
        self._whole = self._whole or reason

    def reset(self, why: str) -> None:
        """Note the reset of the environment of the next row; with ``why`` it failed, and the row cannot be used.

        Those between :meth:`end_of_resets` and :meth:`begin` are of tools, and belong to no row.
        """
        if not self._resetting:
            return
        if why:
            self._marked[self._resets] = f"{why}."
        self._resets += 1

    def begin(self) -> None:
        """Forget the resets of a batch before: those of the next one come."""
        self._resetting, self._resets, self._marked = True, 0, {}

    def end_of_resets(self) -> None:
        """The environments of all rows are reset."""
        self._resetting = False

    def scored(self, why: str) -> None:
        """Note a reward that an environment was asked for; with ``why`` it gave none."""
        self._asked += 1
        self._unscored += [why] if why else []

    # ------------------------------------------------------------------------------------------------------- ranks

    def agree(
        self,
        completions: Sequence[Sequence[int]],
        logps: Sequence[Sequence[float | None]] | None,
        mask: Sequence[Sequence[int]] | None = None,
    ) -> Screened:
        """Agree with the other ranks on the rows of a generation batch that leave it. All ranks call it.

        Args:
            completions: ids of this rank's completions, fillers among them.
            logps: log-prob of each token; None = the engine gives none.
            mask: 1 = sampled by the engine; None = all are.

        Raises:
            RolloutError: on all ranks: a reply cannot be used and the mode is "raise"; none of any rank can be used;
                or the engine of a rank gave no log-prob at all.
        """
        mine = self._tally(completions, logps, mask)
        whole, self._whole, self._retried = self._whole, None, 0
        everyone: list[tuple[_Tally, str | None]] = gather_objects((mine, whole))
        tallies = [tally for tally, _ in everyone]
        broken = next(((rank, why) for rank, (_, why) in enumerate(everyone) if why is not None), None)
        if broken is not None:
            raise RolloutError(_said(f"{broken[1]}.", broken[0], len(everyone)))
        missing = next((rank for rank, tally in enumerate(tallies) if tally.logps is False), None)
        if missing is not None:
            raise RolloutError(_said(_NO_LOGPS, missing, len(everyone)))
        reasons = [
            (rank, row, why.removesuffix("."))
            for rank, tally in enumerate(tallies)
            for row, why in tally.reasons.items()
        ]
        asked = sum(tally.rows for tally in tallies)
        if reasons:
            self._tell(reasons, asked, len(everyone))
        first = [sum(tally.rows for tally in tallies[:rank]) for rank in range(len(tallies))]
        dropped, retried = len(mine.reasons), mine.retried
        return Screened(
            tuple(sorted(first[rank] + row for rank, row, _ in reasons)),
            tuple(sorted(mine.reasons)),
            sum(tally.tokens for tally in tallies),
            (dropped + retried, mine.rows, dropped, retried),
            any(tally.masked for tally in tallies),
        )

    def agree_on_scores(self) -> None:
        """End the run on all ranks if every reward that environments were asked for failed. All ranks call it.

        Raises:
            RolloutError: on all ranks, with the last failure of one.
        """
        if not self.scored_by_environments:
            return
        mine = (self._asked, len(self._unscored), self._unscored[-1] if self._unscored else None)
        self._asked, self._unscored = 0, []
        everyone: list[tuple[int, int, str | None]] = gather_objects(mine)
        asked, failed = sum(one[0] for one in everyone), sum(one[1] for one in everyone)
        if asked and failed == asked:
            rank, why = next((rank, why) for rank, (_, _, why) in enumerate(everyone) if why is not None)
            raise RolloutError(
                _said(f"{why}.", rank, len(everyone)) + f" So did all {asked} of the generation batch, and nothing "
                "would be learned from them. Mend the environment."
            )

    def _tally(self, completions: Sequence[Sequence[int]], logps: Any, mask: Sequence[Sequence[int]] | None) -> _Tally:
        reasons, self._marked = self._marked, {}
        tokens = sum(len(completions[row]) if mask is None else sum(mask[row]) for row in reasons)
        if logps is None:
            return _Tally(len(completions), reasons, tokens, self._retried, None, mask is not None)
        any_token = any_logp = False
        for row, values in enumerate(logps):
            bad = next((value for value in values if isinstance(value, Unusable)), None)
            if row in reasons:
                continue
            if bad is not None:
                reasons[row] = bad.reason
                tokens += len(values) if mask is None else sum(mask[row])
            elif not any_logp:
                own = values if mask is None else [one for one, here in zip(values, mask[row], strict=True) if here]
                any_token |= bool(own)
                any_logp = any(one is not None and math.isfinite(one) for one in own)
        found = any_logp if any_token else None
        return _Tally(len(completions), reasons, tokens, self._retried, found, mask is not None)

    def _tell(self, reasons: Sequence[tuple[int, int, str]], asked: int, ranks: int) -> None:
        listed = [_said(f"row {row}: {why}.", rank, ranks) for rank, row, why in reasons[:_LISTED]]
        said = f"{len(reasons)} of {asked} replies of the engine cannot be trained on. {' '.join(listed)}"
        if self.mode == "raise":
            raise RolloutError(
                f"{said} Look at the engine: its log, its version, its tokenizer. on_bad_rollout: retry asks for such "
                "a reply again, on_bad_rollout: drop goes on without it."
            )
        if len(reasons) == asked:
            raise RolloutError(f"{said} Nothing is left to learn from. Look at the engine: its log, its version.")
        logger.warning("%s They leave the batch, and the baselines of their groups.", said)


_NO_LOGPS = (
    "sampling_per_token_logps must hold the log-prob of each sampled token, but the engine gave none that is finite in "
    "a whole generation batch: nothing can be corrected or measured, and every weight would be 1. Have the engine "
    "return them (logprobs of the sampled token), or look for NaN in its logits (float16 overflow, broken weights)."
)


def _said(text: str, rank: int, ranks: int) -> str:
    """A sentence, with the rank in front if there are several."""
    return text if ranks == 1 else f"Rank {rank}: {text}"


def _columns(rollouts: Rollouts) -> Columns:
    named = {item.name: getattr(rollouts, item.name) for item in fields(rollouts)}
    if named["sampling_per_token_logps"] is not None:
        named["logps"] = named["sampling_per_token_logps"]
    del named["sampling_per_token_logps"]
    return {name: values for name, values in named.items() if values is not None}


def _first(versions: Sequence[Sequence[int]]) -> int:
    return next((row[0] for row in versions if row), -1)


def _of_prompt(routes: Sequence[Any] | None, row: int, length: int) -> Any:
    """The routing of the prompt alone, which is all that is fed for a completion of one token."""
    return None if routes is None or routes[row] is None else routes[row][:length]
