"""The ``replay`` argument of a trainer: which buffer, and how much of it a generation batch gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trl_offpolicy.checks import check_whole, near
from trl_offpolicy.rollouts.replay.buffer import ReplayBuffer
from trl_offpolicy.rollouts.replay.priority import AgeDecay


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """A replay buffer and its use.

    Args:
        groups: groups that are drawn and added to each generation batch.
        max_lag: largest age of a drawn group, in optimizer steps; None = age only lowers priority.
        buffer: an open :class:`ReplayBuffer`; None = one that is made in ``folder``.
        folder: of the buffer, also one of an earlier run, whose groups are then drawn if they have as many responses
            as this run's; None = ``replay`` in the trainer's folder, or ``replay-2``, ... if earlier runs have left
            theirs there.
        max_rows: largest number of responses to keep, or None.
        max_bytes: largest size on disk, or None. One of the two bounds is needed without ``buffer``.
        decay: fall of a group's priority per weight version (``AgeDecay.rate``); None = its default.
        seed: of the draws.
        in_checkpoint: whether a checkpoint holds the files of the buffer. If not, a resumed run finds the folder as it
            is; groups from after the checkpoint are not drawn until the run has come as far again.

    Raises:
        ValueError: a field is not valid; the message names it.
    """

    groups: int
    max_lag: int | None = None
    buffer: ReplayBuffer | None = None
    folder: str | Path | None = None
    max_rows: int | None = None
    max_bytes: int | None = None
    decay: float | None = None
    seed: int = 42
    in_checkpoint: bool = True

    def __post_init__(self) -> None:
        check_whole("replay.groups", self.groups, least=1)
        check_whole("replay.seed", self.seed, least=0)
        if self.max_lag is not None:
            check_whole("replay.max_lag", self.max_lag, least=0)
        if not isinstance(self.buffer, ReplayBuffer | None):
            raise ValueError(f"replay.buffer must be a ReplayBuffer or None, but got {self.buffer!r}.")
        own = [name for name in ("folder", "max_rows", "max_bytes", "decay") if getattr(self, name) is not None]
        if self.buffer is not None and own:
            raise ValueError(f"replay.{own[0]} must be left out with replay.buffer, which has its own.")
        if self.buffer is None and self.max_rows is None and self.max_bytes is None:
            raise ValueError("replay.max_rows or replay.max_bytes must be given, but got neither: nothing bounds it.")

    @classmethod
    def parse(cls, value: Any) -> ReplaySettings | None:
        """Parse the argument: a mapping, settings, or None (no replay)."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"replay must be a mapping with 'groups' and a buffer, but got {value!r}.")
        known = [item.name for item in fields(cls)]
        for name in value:
            if name not in known:
                raise ValueError(f"replay.{name} is not an option of replay, which are {known}.{near(name, known)}")
        if "groups" not in value:
            raise ValueError("replay.groups must be given: the number of groups to add to each generation batch.")
        return cls(**value)

    def open(self, folder: Path) -> ReplayBuffer:
        """The buffer; a new one is in ``folder`` unless the settings name another.

        Raises:
            BlockingIOError: another process has it open.
        """
        if self.buffer is not None:
            return self.buffer
        decay = None if self.decay is None else AgeDecay(rate=self.decay)
        bounds = {"max_rows": self.max_rows, "max_bytes": self.max_bytes}
        return ReplayBuffer(folder if self.folder is None else self.folder, **bounds, decay=decay)
