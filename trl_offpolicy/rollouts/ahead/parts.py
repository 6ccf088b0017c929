"""A response that may have been sampled in parts, each by one version of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CUT = "abort"
"""vLLM's finish reason of a request that was cut."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one request returned.

    Args:
        token_ids: sampled tokens.
        logps: log-prob of each under the distribution that it was drawn from, nats.
        version: of the weights that sampled them.
        finish_reason: ``abort`` where the request was cut.

    Raises:
        ValueError: not one log-prob for each token.
    """

    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    version: int
    finish_reason: str

    def __post_init__(self) -> None:
        if len(self.logps) != len(self.token_ids):
            raise ValueError(
                f"logps must have one entry for each of {len(self.token_ids)} tokens, but got {len(self.logps)}."
            )


@dataclass(frozen=True)
class ResponseInParts:
    """Parts of one response, in order."""

    parts: tuple[Part, ...]

    @property
    def token_ids(self) -> list[int]:
        """All tokens."""
        return [token for part in self.parts for token in part.token_ids]

    @property
    def logps(self) -> list[float]:
        """Their log-probs, nats: each from the policy that sampled it."""
        return [value for part in self.parts for value in part.logps]

    @property
    def versions(self) -> list[int]:
        """The version that sampled each token."""
        return [part.version for part in self.parts for _ in part.token_ids]

    @property
    def finish_reason(self) -> str:
        """Of the last part."""
        return self.parts[-1].finish_reason

    def is_finished(self, max_tokens: int) -> bool:
        """False if it was cut before its end; a response of ``max_tokens`` has none left to sample."""
        return self.finish_reason != CUT or len(self.token_ids) >= max_tokens

    def then(self, part: Part) -> ResponseInParts:
        """With one more part."""
        return ResponseInParts((*self.parts, part))


def padded_versions(rows: Sequence[Sequence[int]], *, length: int, of_empty: int) -> list[list[int]]:
    """(B, length): the version of each token; padding repeats a row's last one.

    Args:
        rows: versions of each row's tokens.
        length: T, at least the longest row.
        of_empty: for a row without tokens.

    Raises:
        ValueError: a row is longer than ``length``.
    """
    longest = max(map(len, rows), default=0)
    if longest > length:
        raise ValueError(f"length must be at least {longest}, the longest row, but got {length}.")
    return [[*row, *[row[-1] if row else of_empty] * (length - len(row))] for row in rows]
