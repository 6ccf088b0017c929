"""Bounds how many rollouts may be requested, so that none is too old when it is learned from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Admission:
    """AReaL's bound: floor((N_r - 1) / B) <= i + eta.

    Rollouts are learned from in the order in which they were requested, B at a time. Rollout N_r (counted from 1)
    belongs to batch floor((N_r - 1) / B), which is learned from when the version has that number. If it is requested
    at version i, its lag is at most eta. No rollout is thrown away for its age: one that would become too old is
    requested later.

    Args:
        batch_size: B, rollouts per batch.
        lag: eta, versions that a rollout may be behind; None = unbounded.

    Raises:
        ValueError: a field is out of range; the message names it.

    Example:
        >>> bound = Admission(batch_size=8, lag=1)
        >>> [bound.allowance(submitted=0, version=0), bound.allowance(submitted=16, version=0)]
        [16, 0]
        >>> bound.allowance(submitted=16, version=1)
        8

    Reference: Fu et al. 2025, AReaL (arXiv:2505.24298), equation 3.
    """

    batch_size: int
    lag: int | None

    def __post_init__(self) -> None:
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise ValueError(f"batch_size must be a whole number >= 1, but got {self.batch_size!r}.")
        if self.lag is not None and (type(self.lag) is not int or self.lag < 0):
            raise ValueError(f"lag must be a whole number >= 0 or None, but got {self.lag!r}.")

    def admits(self, *, submitted: int, version: int) -> bool:
        """True if one more rollout may be requested.

        Args:
            submitted: rollouts requested so far, including those in flight.
            version: i, batches learned from so far.
        """
        return self.lag is None or submitted // self.batch_size <= version + self.lag

    def allowance(self, *, submitted: int, version: int) -> int:
        """How many more rollouts may be requested now.

        Raises:
            ValueError: the bound is unlimited.
        """
        if self.lag is None:
            raise ValueError("lag must be a number for an allowance, but got None (unbounded).")
        return max(0, self.batch_size * (version + self.lag + 1) - submitted)
