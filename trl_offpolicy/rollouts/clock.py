"""Where the time of a training step goes, on the clock of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

PARTS = ("generation", "waiting", "sync", "rewards", "scoring", "correction", "backward", "recording")
"""What is timed."""
TIME_METRICS = (*PARTS, "learning")
"""Keys below ``offpolicy/time/``: the parts, and the rest of a step, which is mostly the forward of the loss."""


class StepClock:
    """Seconds of each part of the training steps since the last logging step.

    A part inside another one is not counted in the outer. The clock never waits for the device: what a GPU still
    computes when a part ends is counted where the process next waits for it.

    Example:
        >>> clock = StepClock()
        >>> clock.spend("sync", 1.0)
        >>> clock.close(6.0, steps=2)["learning"]
        2.5
    """

    def __init__(self) -> None:
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._open: list[tuple[str, float]] = []
        self._inside = [0.0]  # for each open part, the outermost first: seconds of the parts within it

    @contextmanager
    def part(self, name: str, *, counted: bool = True) -> Iterator[None]:
        """Count the time inside the block as ``name``, one of :data:`PARTS`; ``counted=False``: it is in no step."""
        if not counted:
            yield
            return
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def begin(self, name: str) -> None:
        """From now on the time is that of ``name``, where no block can be put around a part; :meth:`end` closes it."""
        self._open.append((name, time.monotonic()))
        self._inside.append(0.0)

    def end(self, name: str) -> None:
        """Close the part that was begun last."""
        opened, start = self._open.pop()
        assert opened == name, (opened, name)
        self._spent[name] -= self._inside.pop()
        self.spend(name, time.monotonic() - start)

    def timed(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """The same function, each call of which is counted as ``name``."""

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.part(name):
                return function(*args, **kwargs)

        return call

    def spend(self, name: str, seconds: float) -> None:
        """Count ``seconds`` that were measured elsewhere, within the part that is open."""
        self._spent[name] += seconds
        self._inside[-1] += seconds

    def close(self, seconds: float, *, steps: int) -> dict[str, float]:
        """Mean seconds of each part per optimizer step; the next window begins.

        Args:
            seconds: length of the window.
            steps: optimizer steps in it.
        """
        spent, self._spent = self._spent, dict.fromkeys(PARTS, 0.0)
        rest = max(seconds - sum(spent.values()), 0.0)
        return {name: value / max(steps, 1) for name, value in {**spent, "learning": rest}.items()}
