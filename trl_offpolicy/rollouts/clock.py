"""Where the time of a training step goes, on the clock of this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = ("generation", "sync", "rewards", "scoring")
"""What is timed."""
TIME_METRICS = (*PARTS, "learning")
"""Keys below ``offpolicy/time/``: the parts, and the rest of a step."""


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
        self._inside = [0.0]  # for each open part, the outermost first: seconds of the parts within it

    @contextmanager
    def part(self, name: str, *, counted: bool = True) -> Iterator[None]:
        """Count the time inside the block as ``name``, one of :data:`PARTS`; ``counted=False``: it is in no step."""
        if not counted:
            yield
            return
        start = time.monotonic()
        self._inside.append(0.0)
        try:
            yield
        finally:
            whole = time.monotonic() - start
            self._spent[name] -= self._inside.pop()
            self.spend(name, whole)

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
