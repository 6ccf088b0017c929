"""Responses that may have been sampled in parts, each part by one version of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from trl_offpolicy.engines.engine import Rollouts
from trl_offpolicy.functional.truncated_sampling import KeptIds

CUT = "abort"
"""vLLM's finish reason of a request that was cut."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The tokens that one request returned.

    Args:
        token_ids: sampled tokens.
        logps: log-prob of each token under the distribution that it was drawn from, nats.
        version: version of the weights that sampled them.
        finish_reason: vLLM's; ``abort`` if the request was cut.
        kept: what truncated sampling kept at each token; None = not known.
        routes: (tokens, layers, k) experts of everything that the request was fed: prompt, earlier parts, and these
            tokens without the last one. None = not known.

    Raises:
        ValueError: the number of log-probs, or of kept positions, differs from that of tokens.
    """

    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    version: int
    finish_reason: str
    kept: KeptIds | None = None
    routes: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.logps) != len(self.token_ids):
            raise ValueError(
                f"logps must have one entry for each of {len(self.token_ids)} tokens, but got {len(self.logps)}."
            )
        if self.kept is not None and len(self.kept) != len(self.token_ids):
            raise ValueError(
                f"kept must have one position for each of {len(self.token_ids)} tokens, but got {len(self.kept)}."
            )


@dataclass(frozen=True)
class ResponseInParts:
    """One response as its parts, in order."""

    parts: tuple[Part, ...]

    @property
    def token_ids(self) -> list[int]:
        """The token ids of all parts, in order."""
        return [token for part in self.parts for token in part.token_ids]

    @property
    def logps(self) -> list[float]:
        """The log-prob of each token under the policy that sampled it, nats."""
        return [value for part in self.parts for value in part.logps]

    @property
    def versions(self) -> list[int]:
        """The version that sampled each token."""
        return [part.version for part in self.parts for _ in part.token_ids]

    @property
    def kept(self) -> KeptIds | None:
        """What was kept at each token, nothing listed in parts that do not know it; None if none does."""
        if all(part.kept is None for part in self.parts):
            return None
        unknown = (KeptIds.unreported(len(part.token_ids)) for part in self.parts)
        return KeptIds.joined([part.kept or none for part, none in zip(self.parts, unknown, strict=True)])

    @property
    def routes(self) -> Tensor | None:
        """The experts of prompt and response without its last token: each token as it was routed when it was sampled.

        A later request feeds the earlier tokens again, under new weights; what it reports of them is left out. None if
        a part with tokens does not know.
        """
        found: Tensor | None = None
        for part in self.parts:
            if not part.token_ids:
                continue
            if part.routes is None:
                return None
            found = part.routes if found is None else torch.cat([found, part.routes[len(found) :]])
        return found

    @property
    def finish_reason(self) -> str:
        """The finish reason of the last part."""
        return self.parts[-1].finish_reason

    @property
    def fruitless(self) -> int:
        """How many requests in a row, the last ones, were cut before their first token."""
        empty = takewhile(lambda part: not part.token_ids and part.finish_reason == CUT, reversed(self.parts))
        return sum(1 for _ in empty)

    def is_finished(self, max_tokens: int) -> bool:
        """False if the response was cut before its end. One of ``max_tokens`` tokens has none left to sample."""
        return self.finish_reason != CUT or len(self.token_ids) >= max_tokens

    def then(self, part: Part) -> ResponseInParts:
        """The response with ``part`` appended."""
        return ResponseInParts((*self.parts, part))


def as_rollouts(rows: Sequence[ResponseInParts], prompts: Sequence[list[int]] = ()) -> Rollouts:
    """Responses as the rows of an engine.

    Args:
        rows: B responses.
        prompts: their B prompts; none if these come later.
    """
    kept, routes = [row.kept for row in rows], [row.routes for row in rows]
    return Rollouts(
        prompt_ids=list(prompts),
        completion_ids=[row.token_ids for row in rows],
        sampling_per_token_logps=[row.logps for row in rows],
        policy_versions=[row.versions for row in rows],
        finish_reasons=[row.finish_reason for row in rows],
        routed_experts=None if all(one is None for one in routes) else routes,
        sampling_mask=None if all(one is None for one in kept) else kept,
    )


def padded_versions(rows: Sequence[Sequence[int]], *, length: int, of_empty: int) -> list[list[int]]:
    """(B, length): the version of each token. Padding repeats a row's last version.

    Args:
        rows: versions of each row's tokens.
        length: T, at least the longest row.
        of_empty: version for a row without tokens.

    Raises:
        ValueError: a row is longer than ``length``.
    """
    longest = max(map(len, rows), default=0)
    if longest > length:
        raise ValueError(f"length must be at least {longest}, the longest row, but got {length}.")
    return [[*row, *[row[-1] if row else of_empty] * (length - len(row))] for row in rows]
