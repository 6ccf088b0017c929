"""The buffer's record of a prompt group, and its parquet form: one row per response, one row group per prompt group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_offpolicy.checks import check_number

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class Response:
    """One finished completion of T tokens, as it was sampled.

    Args:
        completion_ids: T token ids, tool tokens included.
        sampling_logps: T log-probs of the engine (mu), nats; NaN = none.
        policy_versions: T weight versions that sampled the tokens; a rollout across a weight sync has several.
        completion_mask: T, True = trainable token; None = all are trainable.
        old_logps: T log-probs of the trainer at the weights that sampled (pi_old), nats; None = not computed.
        kept_ids: T sets of the ids that truncated sampling kept, an empty one where that is not known; None = of none.
        reward: reward of the response; NaN = none.

    Raises:
        ValueError: there is no token, or the fields differ in length.
    """

    completion_ids: tuple[int, ...]
    sampling_logps: tuple[float, ...]
    policy_versions: tuple[int, ...]
    completion_mask: tuple[bool, ...] | None = None
    old_logps: tuple[float, ...] | None = None
    kept_ids: tuple[tuple[int, ...], ...] | None = None
    reward: float

    def __post_init__(self) -> None:
        length = len(self.completion_ids)
        if not length:
            raise ValueError("completion_ids must have at least one token, but got none.")
        for name in ("sampling_logps", "policy_versions", "completion_mask", "old_logps", "kept_ids"):
            value = getattr(self, name)
            if value is not None and len(value) != length:
                raise ValueError(f"{name} must have {length} entries, one a token, but got {len(value)}.")


@dataclass(frozen=True, kw_only=True)
class ReplayGroup:
    """The responses to one prompt. Groups stay together, because advantages are made within them.

    Args:
        prompt_ids: token ids of the prompt.
        responses: at least one response.
        group_id: number of the group in the run that made it.
        priority: how much there is to learn from the group, positive and finite, before age counts. For GRPO the
            standard deviation of the rewards is a candidate, because a group of equal rewards has no advantage. 1 for
            every group = no preference.

    Raises:
        ValueError: there is no response, or the priority is not positive and finite.
    """

    prompt_ids: tuple[int, ...]
    responses: tuple[Response, ...]
    group_id: int
    priority: float = 1.0

    def __post_init__(self) -> None:
        if not self.responses:
            raise ValueError("responses must have at least one response, but got none.")
        check_number("priority", self.priority)
        if self.priority <= 0:
            raise ValueError(f"priority must be positive, but got {self.priority}.")

    @property
    def oldest_version(self) -> int:
        """The oldest weight version of its tokens, which decides its age."""
        return min(min(response.policy_versions) for response in self.responses)


class Entry(NamedTuple):
    """Where a stored group is, and what is needed to draw it."""

    part: Path
    row_group: int
    rows: int
    version: int
    priority: float
    group_id: int


def write_part(groups: list[ReplayGroup], path: Path) -> None:
    """Write one parquet file with a row group per prompt group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema()
    with pq.ParquetWriter(path, schema) as writer:
        for group in groups:
            writer.write_table(pa.Table.from_pylist(_rows(group), schema=schema))


def read_entries(path: Path) -> list[Entry]:
    """The groups of a part, without their tokens.

    Raises:
        OSError, ValueError: the file is not a part (pyarrow's errors are subclasses).
    """
    import pyarrow.parquet as pq

    entries = []
    with pq.ParquetFile(path) as file:
        for place in range(file.num_row_groups):
            table = file.read_row_group(place, columns=["group_id", "oldest_version", "priority"])
            version, priority, group_id = (table.column(name)[0].as_py() for name in _ENTRY_COLUMNS)
            entries.append(Entry(path, place, table.num_rows, version, priority, group_id))
    return entries


_ENTRY_COLUMNS = ("oldest_version", "priority", "group_id")


def read_group(entry: Entry) -> ReplayGroup:
    """Read a stored group with its tokens, as it was added."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(entry.part) as file:
        rows = file.read_row_group(entry.row_group).to_pylist()
    responses = tuple(_response(row) for row in rows)
    first = rows[0]
    return ReplayGroup(
        prompt_ids=tuple(first["prompt_ids"]),
        responses=responses,
        group_id=first["group_id"],
        priority=first["priority"],
    )


def _rows(group: ReplayGroup) -> list[dict[str, Any]]:
    shared = {
        "group_id": group.group_id,
        "priority": group.priority,
        "oldest_version": group.oldest_version,
        "prompt_ids": group.prompt_ids,
    }
    return [
        {
            **shared,
            "completion_ids": one.completion_ids,
            "completion_mask": one.completion_mask,
            "sampling_per_token_logps": one.sampling_logps,
            "old_per_token_logps": one.old_logps,
            "kept_ids": one.kept_ids,
            "policy_versions": one.policy_versions,
            "reward": one.reward,
        }
        for one in group.responses
    ]


def _response(row: dict[str, Any]) -> Response:
    mask, old, reward = row["completion_mask"], row["old_per_token_logps"], row["reward"]
    kept = row.get("kept_ids")  # parts of earlier versions lack it
    return Response(
        completion_ids=tuple(row["completion_ids"]),
        completion_mask=None if mask is None else tuple(mask),
        sampling_logps=tuple(row["sampling_per_token_logps"]),
        old_logps=None if old is None else tuple(old),
        kept_ids=None if kept is None else tuple(map(tuple, kept)),
        policy_versions=tuple(row["policy_versions"]),
        reward=math.nan if reward is None else reward,
    )


def _schema() -> pa.Schema:
    import pyarrow as pa

    ids, floats = pa.list_(pa.int64()), pa.list_(pa.float32())
    return pa.schema(
        {
            "group_id": pa.int64(),
            "priority": pa.float64(),
            "oldest_version": pa.int64(),
            "prompt_ids": ids,
            "completion_ids": ids,
            "completion_mask": pa.list_(pa.bool_()),
            "sampling_per_token_logps": floats,
            "old_per_token_logps": floats,
            "kept_ids": pa.list_(pa.list_(pa.int32())),
            "policy_versions": ids,
            "reward": pa.float64(),
        }
    )
