"""The replay buffer: a bounded folder of parquet parts, with one writer."""

from __future__ import annotations

import fcntl
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trl_offpolicy.engines.weights.files import fsync
from trl_offpolicy.rollouts.replay.priority import AgeDecay, Floats, draw_without_repetition
from trl_offpolicy.rollouts.replay.records import Entry, ReplayGroup, read_entries, read_group, write_part

_PART = 2**20
"""Most groups of one part. So part and place together number a group, without a counter that must be saved."""


@dataclass(frozen=True)
class ReplaySample:
    """A draw of k groups.

    Args:
        groups: k distinct groups.
        weights: (k,) importance weights. With them the mean over the draw is an unbiased estimate of the buffer's plain
            mean (:func:`~trl_offpolicy.rollouts.replay.draw_without_repetition`). Ignore them to prefer fresh groups.
        lags: (k,) weight versions between the oldest token of each group and now.
        ids: (k,) a number of each group in this buffer, negative, the same at each draw. Fresh groups are numbered
            from 0 in each run, so it is never that of a fresh group.
    """

    groups: tuple[ReplayGroup, ...]
    weights: Floats
    lags: NDArray[np.int64]
    ids: NDArray[np.int64]


class ReplayBuffer:
    """Prompt groups on disk. The newest are kept, and groups are drawn by priority and age.

    Once :meth:`add` returns, its groups are on disk (written to a temporary file, flushed, renamed) and survive a kill
    and a restart. A half-written part does not. The oldest parts are deleted to make room. The tokens of a group are
    read when it is drawn; memory holds one small record per group.

    Args:
        folder: folder of the buffer, made if it is missing. Only one process may open it: with several ranks let the
            main one keep the buffer.
        max_rows: largest number of responses to keep, or None.
        max_bytes: largest size of the files on disk, or None. While a part is being added there may be one part more.
        decay: how priority falls with age.

    Raises:
        ValueError: neither bound is given, or a bound is not positive.
        BlockingIOError: another process has the buffer open.

    Example:
        >>> import tempfile
        >>> from trl_offpolicy.rollouts.replay import ReplayBuffer, ReplayGroup, Response
        >>> response = Response(completion_ids=(5, 6), sampling_logps=(-0.1, -0.2), policy_versions=(3, 3), reward=1.0)
        >>> buffer = ReplayBuffer(tempfile.mkdtemp(), max_rows=100)
        >>> buffer.add([ReplayGroup(prompt_ids=(1, 2), responses=(response,), group_id=0)])
        >>> buffer.sample(1, current_version=5, rng=np.random.default_rng(0)).lags
        array([2])
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        decay: AgeDecay | None = None,
    ) -> None:
        if max_rows is None and max_bytes is None:
            raise ValueError(
                "max_rows or max_bytes must be given, but got None for both: the buffer would fill the disk."
            )
        for name, value in (("max_rows", max_rows), ("max_bytes", max_bytes)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, but got {value}.")
        self.folder, self.max_rows, self.max_bytes = Path(folder), max_rows, max_bytes
        self.decay = AgeDecay() if decay is None else decay
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / ".lock").open("w")
        _lock(self._lock.fileno(), self.folder)
        for left_over in self.folder.glob(".part-*.tmp"):
            left_over.unlink()
        self._parts: dict[Path, list[Entry]] = {}
        self._sizes: dict[Path, int] = {}
        paths = sorted(self.folder.glob("part-*.parquet"))
        self._next = _part_number(paths[-1]) + 1 if paths else 0
        for path in paths:
            self._open_part(path)
        self._make_room()

    def _open_part(self, path: Path) -> None:
        try:
            self._parts[path] = read_entries(path)
        except (OSError, ValueError, KeyError) as error:
            warnings.warn(f"{path} is left out: {str(error).splitlines()[0]}", stacklevel=3)
            return
        self._sizes[path] = path.stat().st_size

    def __len__(self) -> int:
        """Number of groups in the buffer."""
        return sum(len(entries) for entries in self._parts.values())

    @property
    def rows(self) -> int:
        """Number of responses in the buffer, over all groups."""
        return sum(entry.rows for entries in self._parts.values() for entry in entries)

    @property
    def bytes(self) -> int:
        """Size of all parts on disk, in bytes."""
        return sum(self._sizes.values())

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The records of all groups, oldest addition first."""
        return tuple(entry for entries in self._parts.values() for entry in entries)

    def add(self, groups: Iterable[ReplayGroup]) -> None:
        """Store finished groups as one part. An empty ``groups`` does nothing.

        Raises:
            ValueError: these groups alone exceed a bound, or are more than 2^20.
        """
        several = list(groups)
        if not several:
            return
        if len(several) > _PART:
            raise ValueError(f"groups must be at most {_PART} at a time, but got {len(several)}.")
        rows = sum(len(group.responses) for group in several)
        if self.max_rows is not None and rows > self.max_rows:
            raise ValueError(f"groups must have at most max_rows = {self.max_rows} responses, but got {rows}.")
        path = self.folder / f"part-{self._next:012d}.parquet"
        temporary = self.folder / f".{path.stem}.tmp"
        write_part(several, temporary)
        if self.max_bytes is not None and (size := temporary.stat().st_size) > self.max_bytes:
            temporary.unlink()
            raise ValueError(f"groups must need at most max_bytes = {self.max_bytes} on disk, but got {size}.")
        fsync(temporary)
        temporary.replace(path)
        fsync(self.folder)
        self._next += 1
        self._open_part(path)
        self._make_room()

    def _make_room(self) -> None:
        """Delete the oldest parts until the bounds hold."""
        while (self.max_rows is not None and self.rows > self.max_rows) or (
            self.max_bytes is not None and self.bytes > self.max_bytes
        ):
            oldest = next(iter(self._parts))
            oldest.unlink()
            del self._parts[oldest], self._sizes[oldest]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The files of the buffer by name, each as a (bytes,) uint8 tensor, for a checkpoint."""
        return {path.name: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in self._parts}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Make the buffer what it was at :meth:`state_dict`: later groups go, groups that made room come back.

        A kill meanwhile leaves some of the files of both.
        """
        self._restore(state, lambda name, path: path.write_bytes(state[name].cpu().numpy().tobytes()))

    def save(self, folder: Path) -> None:
        """Copy the files of the buffer into ``folder``, for a checkpoint that is a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in self._parts:
            shutil.copyfile(path, folder / path.name)

    def load(self, folder: Path) -> None:
        """Make the buffer what it was at :meth:`save`, as :meth:`load_state_dict` does."""
        names = [path.name for path in folder.glob("part-*.parquet")]
        self._restore(names, lambda name, path: shutil.copyfile(folder / name, path))

    def _restore(self, names: Iterable[str], write: Callable[[str, Path], object]) -> None:
        """Hold the parts of these names and no others. ``write`` writes the part of a name into a file."""
        wanted = sorted(names)
        for path in [path for path in self._parts if path.name not in wanted]:
            path.unlink()
        self._parts, self._sizes, self._next = {}, {}, 0
        for name in wanted:
            path = self.folder / name
            temporary = self.folder / f".{path.stem}.tmp"
            write(name, temporary)
            fsync(temporary)
            temporary.replace(path)
            self._next = _part_number(path) + 1
            self._open_part(path)
        fsync(self.folder)
        self._make_room()

    def available(self, *, current_version: int, max_lag: int | None = None, responses: int | None = None) -> int:
        """Number of groups that :meth:`sample` chooses from with these options."""
        return len(self._eligible(current_version, max_lag, responses))

    def _eligible(self, current_version: int, max_lag: int | None, responses: int | None) -> list[Entry]:
        sized = [entry for entry in self.entries if responses is None or entry.rows == responses]
        ages = ((entry, current_version - entry.version) for entry in sized)
        return [entry for entry, age in ages if age >= 0 and (max_lag is None or age <= max_lag)]

    def sample(
        self,
        count: int,
        *,
        current_version: int,
        rng: np.random.Generator,
        max_lag: int | None = None,
        responses: int | None = None,
    ) -> ReplaySample:
        """Draw ``count`` distinct groups by priority and age.

        Args:
            count: number of groups.
            current_version: current weight version of the learner. Newer groups (from before the run was resumed from
                an older checkpoint) are not drawn until the learner reaches their version.
            rng: numpy generator.
            max_lag: do not draw groups of a larger lag (they stay in the buffer); None = age only lowers priority.
            responses: draw only groups of so many responses; None = of any number.

        Raises:
            ValueError: there are fewer groups than that.
        """
        entries = self._eligible(current_version, max_lag, responses)
        versions = np.array([entry.version for entry in entries], np.int64)
        priorities = np.array([entry.priority for entry in entries], np.float64)
        logs = self.decay.log_priorities(priorities, versions, current_version=current_version)
        drawn = draw_without_repetition(logs, count, rng)
        chosen = [entries[place] for place in drawn.places]
        ids = np.array([-1 - (_part_number(entry.part) * _PART + entry.row_group) for entry in chosen], np.int64)
        groups = tuple(read_group(entry) for entry in chosen)
        return ReplaySample(groups, drawn.weights, current_version - versions[drawn.places], ids)

    def close(self) -> None:
        """Release the lock, so that another process can open the buffer."""
        self._lock.close()

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _part_number(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _lock(descriptor: int, folder: Path) -> None:
    """Take a lock that is released when the process ends, in whatever way."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(f"folder must not be open in another process, but {folder} is.") from error
