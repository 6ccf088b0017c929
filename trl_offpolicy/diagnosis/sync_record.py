"""What the recorded syncs of a run prove: an engine whose weights did not move, got a part, or never got a version."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from trl_offpolicy.diagnosis.attribution.evidence import Seen
from trl_offpolicy.engines.engine import SyncReport
from trl_offpolicy.run_folder.layout import POLICY_VERSION
from trl_offpolicy.run_folder.rollouts import RecordedRollouts, fetch_rows
from trl_offpolicy.run_folder.syncs import repeated_syncs

MOST_REPEATED = 0.5
"""Share of the syncs that may bring the engine nothing although the trainer moved; above it that is a cause."""
LEAST_SYNCS = 3
"""Syncs from which shares of them are judged."""
MOST_ROWS = 4096
"""Responses whose version is looked up: the last ones."""
WHOLE = 0.99
"""Share of the usual number of bytes below which a sync sent only a part."""


def seen_in_syncs(syncs: Sequence[SyncReport], rollouts: RecordedRollouts | None = None) -> tuple[Seen, ...]:
    """Differences between engine and trainer that the syncs prove.

    Args:
        syncs: of the run, in their order.
        rollouts: of the run; None = none were recorded.
    """
    return (*_hidden(syncs), *_parts(syncs), *_never_sent(syncs, rollouts))


def describe_syncs(syncs: Sequence[SyncReport]) -> str:
    """The syncs in a sentence; empty if there is nothing to say about them."""
    known = [one.visible for one in syncs if one.visible is not None]
    still = [after.version for _, after in repeated_syncs(syncs) if after.changed == 0]
    said = []
    if known and min(known) < 1:
        said.append(f"the engine's precision could hold {median(known):.0%} of the changed weights (median)")
    if hidden := len(_hidden_versions(syncs)):
        said.append(f"{hidden} brought the engine the weights that it had, although the trainer's had changed")
    if still:
        said.append(f"{len(still)} found that the trainer itself had not moved")
    return f"Of {len(syncs)} syncs: {'; '.join(said)}." if said else ""


def _hidden_versions(syncs: Sequence[SyncReport]) -> list[int]:
    """Versions that changed the trainer's weights and not the engine's."""
    return [after.version for _, after in repeated_syncs(syncs) if after.changed]


def _hidden(syncs: Sequence[SyncReport]) -> list[Seen]:
    compared = [one for one in syncs[1:] if one.checksum is not None and one.changed]
    hidden = _hidden_versions(syncs)
    if len(compared) < LEAST_SYNCS or len(hidden) <= MOST_REPEATED * len(compared):
        return []
    held = compared[-1].engine_dtype or "its precision"
    share = median(one.changed or 0.0 for one in compared)
    text = f"the same after {len(hidden)} of {len(compared)} syncs ({held})"
    return [Seen("sync_rounding", "weights", text, f"{share:.0%} of the weights changed between syncs")]


def _parts(syncs: Sequence[SyncReport]) -> list[Seen]:
    """A whole sync that sent fewer bytes than the others of its kind."""
    found = []
    for kind in dict.fromkeys(one.kind for one in syncs):
        same = [one for one in syncs if one.kind == kind and one.whole]
        if not same:
            continue
        usual = median(one.bytes for one in same)
        short = [one for one in same if one.bytes < WHOLE * usual]
        if len(same) >= LEAST_SYNCS and short:
            versions = ", ".join(str(one.version) for one in short[:3])
            sent = f"{short[0].bytes} bytes at version {versions}"
            found.append(Seen("stale_weights", "size of a sync", sent, f"{usual:.0f} bytes in the others"))
    return found


def _never_sent(syncs: Sequence[SyncReport], rollouts: RecordedRollouts | None) -> list[Seen]:
    """Responses that name a version of the weights which no sync brought."""
    if not syncs or rollouts is None:
        return []
    rows = np.unique(rollouts.row)[-MOST_ROWS:]
    records = fetch_rows(rollouts, rows.tolist(), (POLICY_VERSION,))
    named = {record[POLICY_VERSION] for record in records.values()} - {None}
    sent = {one.version for one in syncs}
    # What came before the first recorded sync (a resumed run, the weights of the start) is not judged.
    missing = sorted(version for version in named - sent if version > min(sent))
    if not missing:
        return []
    last = max((one for one in sent if one < missing[0]), default=min(sent))
    return [Seen("stale_weights", "version of the weights", f"{last} is the last one sent before", f"{missing[0]}")]
