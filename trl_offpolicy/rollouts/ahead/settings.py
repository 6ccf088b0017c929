"""The ``async_rollouts`` field of a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from trl_offpolicy.checks import check_number
from trl_offpolicy.parts import read_numbers

Partial = Literal["continue", "finish", "keep"]
OldLogps = Literal["recompute_proximal", "snapshot", "model", "balance", "ewma", "refuse"]

_CONTINUABLE = frozenset({"repetition_penalty", "ignore_eos", "logit_bias", "stop_token_ids"})
"""Sampling options that mean the same after a response was cut and continued; those that count output tokens do not."""


@dataclass(frozen=True, kw_only=True)
class AsyncSettings:
    """How far sampling runs ahead of learning.

    Args:
        lag: generation batches that may be sampled ahead (AReaL's eta). A batch is learned from at most ``lag``
            generations after the weights that its requests were sent with. 1 = one-step off-policy, 0 = in turn. Where
            an optimizer step learns from several generations, it counts optimizer steps. A fraction is a part of a
            batch, by whole prompts (ROLL Flash's asynchronous ratio): with 1.5 half of the prompts of every batch are
            requested two generations before it is due, the others one, and 2.5 batches are in flight or wait.
        partial: what a weight sync does with requests in flight. "finish" waits for them, so every response is of one
            version. "continue" cuts them, keeps the tokens with their log-probs and versions, and continues them under
            the new weights. "keep" lets them end under the adapter that they began with: the server holds the adapters
            of several versions, so nothing waits, and every response is of one version. None = "finish" up to lag 1,
            where a sync finds at most what the next optimizer step needs, else "continue".
        old_logps: what replaces the log-probs that the trainer would have given at the weights that sampled.
            "recompute_proximal": nothing. The current weights are the proximal policy, and importance weights hold
            proximal/sampling. "snapshot": the exact log-probs, from copies of the trainable weights of every version in
            the queue. "model": the same log-probs, from a second model that these copies are loaded into, so that the
            weights in training stay where they are. "balance": from the same copies, the mixture of all versions in the
            batch, by their shares of its tokens; the engine's log-probs move along with it, so that old/sampling stays
            what it is. "ewma": the proximal policy is a moving average of the weights. "refuse": an error if the
            objective reads them.
        ewma_decay: weight of the past per optimizer step, with ``old_logps: ewma``.

    Raises:
        ValueError: a field is not valid; the message names it.
    """

    lag: float = 1
    partial: Partial | None = None
    old_logps: OldLogps = "recompute_proximal"
    ewma_decay: float = 0.9

    def __post_init__(self) -> None:
        if isinstance(self.lag, bool) or not isinstance(self.lag, int | float) or not 0 <= self.lag < math.inf:
            raise ValueError(f"async_rollouts.lag must be a number >= 0, but got {self.lag!r}.")
        if self.partial not in (None, *get_args(Partial)):
            raise ValueError(
                f"async_rollouts.partial must be one of {list(get_args(Partial))}, but got {self.partial!r}."
            )
        if self.old_logps not in get_args(OldLogps):
            raise ValueError(
                f"async_rollouts.old_logps must be one of {list(get_args(OldLogps))}, but got {self.old_logps!r}."
            )
        check_number("async_rollouts.ewma_decay", self.ewma_decay)
        if not 0.0 <= self.ewma_decay < 1.0:
            raise ValueError(f"async_rollouts.ewma_decay must be in [0, 1), but got {self.ewma_decay}.")

    @property
    def on_sync(self) -> Partial:
        """What a sync does with requests in flight: ``partial``, or what its None stands for."""
        return self.partial or ("continue" if self.lag > 1 else "finish")

    @property
    def cuts(self) -> bool:
        """True if a sync cuts requests in flight."""
        return self.on_sync == "continue"

    @property
    def keeps(self) -> bool:
        """True if requests in flight go on under the adapter that they began with."""
        return self.on_sync == "keep"

    @property
    def most_versions(self) -> int:
        """How many versions of the weights can have sampled what is in flight, is waiting, or is due."""
        return math.ceil(self.lag) + 1

    @classmethod
    def parse(cls, value: Any) -> AsyncSettings | None:
        """Parse the field: a lag, a mapping, or None (no asynchronous sampling)."""
        if value is None:
            return None
        value = _number(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return cls(lag=value)
        if not isinstance(value, Mapping):
            raise ValueError(f"async_rollouts must be a lag or a mapping, but got {value!r}.")
        value = {name: _number(one) if name == "lag" else one for name, one in read_numbers(value).items()}
        known = [item.name for item in fields(cls)]
        if unknown := sorted(set(value) - set(known)):
            raise ValueError(f"async_rollouts must hold some of {known}, but got {', '.join(map(str, unknown))}.")
        return cls(**value)

    def check_sampling(self, options: Mapping[str, Any]) -> None:
        """Raise if a cut response cannot be continued as if it had not been cut.

        Args:
            options: sampling options beyond temperature, top-p, top-k and min-p, by vLLM's names.

        Raises:
            ValueError: an option that counts or constrains output tokens from the start of the request.
        """
        if self.cuts and (bad := sorted(name for name, value in options.items() if _counts(name, value))):
            raise ValueError(
                "async_rollouts.partial must be 'finish' (the default up to lag 1) or 'keep' with the sampling options "
                f"{', '.join(bad)}, but got 'continue': they begin anew where a cut response is continued."
            )


def _number(value: Any) -> Any:
    """The number that a text is, as a command line or a variable of a recipe gives it; anything else as it is."""
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value


def _counts(name: str, value: Any) -> bool:
    return value is not None and name not in _CONTINUABLE
