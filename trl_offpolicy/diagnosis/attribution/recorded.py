"""Attributes a mismatch from a run's recorded rollouts, without the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from trl_offpolicy.diagnosis.attribution.attribute import Attribution, attribute
from trl_offpolicy.diagnosis.attribution.evidence import Declared, TokenEvidence, padded
from trl_offpolicy.diagnosis.attribution.features import kl_k3
from trl_offpolicy.diagnosis.attribution.signatures import MEMBERS, OTHER_WEIGHTS
from trl_offpolicy.run_folder.layout import (
    COMPLETION_IDS,
    COMPLETION_MASK,
    ENTROPIES,
    GROUP_ID,
    POLICY_VERSION,
    POLICY_VERSIONS,
)
from trl_offpolicy.run_folder.rollouts import RecordedRollouts, fetch_rows

MOST_ROWS = 256
"""Completions looked at: the last ones."""
GREW = 20.0
"""Times that the mismatch must have grown since the start of the run to be blamed on weights."""
SMALL_START = 1e-3
"""KL k3, nats per token, that it must have begun below."""
_EXTRAS = (COMPLETION_IDS, COMPLETION_MASK, GROUP_ID, ENTROPIES, POLICY_VERSION, POLICY_VERSIONS)


def recorded_evidence(
    rollouts: RecordedRollouts, info: Mapping[str, Any], *, steps: tuple[int, int] | None = None
) -> TokenEvidence | None:
    """The last recorded completions as evidence; None if no token has both log-probs.

    Args:
        rollouts: rollouts of the run.
        info: ``run.json``; its entry ``declared`` is what both sides declare.
        steps: optimizer steps (first, last) that are judged; None = all. Rollouts are recorded at the step before
            their metrics are logged, so that step counts as well.
    """
    wanted = np.unique(rollouts.row)
    if steps is not None:
        wanted = wanted[(rollouts.steps[wanted] >= steps[0] - 1) & (rollouts.steps[wanted] <= steps[1])]
    wanted = wanted[-MOST_ROWS:]
    if not wanted.size:
        return None
    token = np.isin(rollouts.row, wanted)
    row, position = np.searchsorted(wanted, rollouts.row[token]), rollouts.position[token]
    shape = (len(wanted), int(position.max()) + 1)
    sampling, log_ratio = rollouts.sampling_logp[token], rollouts.log_ratio[token]
    extras = _extras(rollouts, wanted, shape)
    return TokenEvidence(
        sampling_per_token_logps=_scattered(sampling, row, position, shape),
        old_per_token_logps=_scattered(sampling + log_ratio.astype(np.float64), row, position, shape),
        completion_mask=np.isfinite(_scattered(sampling, row, position, shape)),
        engine=_declared(info, "engine"),
        trainer=_declared(info, "trainer"),
        **extras,
    )


def attribute_run(
    rollouts: RecordedRollouts, info: Mapping[str, Any], *, steps: tuple[int, int] | None = None
) -> Attribution | None:
    """Why engine and trainer differ in the judged steps; None if no token has both log-probs.

    The start of the run is compared too: different settings show from the first step on, but weights that do not arrive
    show only once the policy has moved.
    """
    evidence = recorded_evidence(rollouts, info, steps=steps)
    if evidence is None:
        return None
    found, grown = attribute(evidence), growth(rollouts, steps)
    if grown is None or found.cause in ("none", *MEMBERS):
        return found
    synced = evidence.engine is not None and evidence.engine.weight_version is not None
    cause = "stale_weights" if synced else OTHER_WEIGHTS
    says = " although both sides declare the same weights" if synced else ""
    reason = (
        f"KL k3 grew from {grown[0]:.1e} in the first recorded steps to {grown[1]:.1e}{says}: weights that do not "
        "arrive do that, settings that differ do so from the start"
    )
    return replace(
        found, cause=cause, coarse=OTHER_WEIGHTS, confidence=1 - grown[0] / grown[1], runner_up=found.cause,
        reasons=(reason, *found.reasons), detail="",
    )  # fmt: skip


def growth(rollouts: RecordedRollouts, steps: tuple[int, int] | None) -> tuple[float, float] | None:
    """KL k3 of the first tenth of the recorded steps and of the judged ones, if it began small and grew much."""
    at = rollouts.steps[rollouts.row]
    known = np.unique(at)
    early = at <= known[(len(known) - 1) // 10]
    late = np.ones(len(at), bool) if steps is None else (at >= steps[0] - 1) & (at <= steps[1])
    late &= at > known[len(known) // 2]  # the judged steps may be the whole run: its second half, then
    if not late.any():
        return None
    first, last = kl_k3(rollouts.log_ratio[early]), kl_k3(rollouts.log_ratio[late])
    return (first, last) if first < min(SMALL_START, last / GREW) else None


def _declared(info: Mapping[str, Any], side: str) -> Declared | None:
    declared = (info.get("declared") or {}).get(side)
    if declared is None:
        return None
    known = {item.name for item in fields(Declared)}  # run.json of another version may hold other fields
    return Declared(**{name: value for name, value in declared.items() if name in known})


def _scattered(values: Any, row: Any, position: Any, shape: tuple[int, int]) -> Any:
    out = np.full(shape, np.nan)
    out[row, position] = values
    return out


def _extras(rollouts: RecordedRollouts, wanted: Any, shape: tuple[int, int]) -> dict[str, Any]:
    """Those of token ids, prompt groups, entropies, version lags and turns that every row has."""
    records = fetch_rows(rollouts, wanted.tolist(), _EXTRAS)
    columns = {name: [records[int(row)][name] for row in wanted] for name in _EXTRAS}
    known = {name: values for name, values in columns.items() if all(value is not None for value in values)}
    extras: dict[str, Any] = {}
    if COMPLETION_IDS in known:
        ids = padded([ids[: shape[1]] for ids in known[COMPLETION_IDS]], width=shape[1], fill=-1)
        extras["token_ids"] = ids.astype(np.int64)
    if GROUP_ID in known:
        extras["group_ids"] = np.asarray(known[GROUP_ID], np.int64)
    if ENTROPIES in known:
        extras["entropies"] = padded([row[: shape[1]] for row in known[ENTROPIES]], width=shape[1])
    if COMPLETION_MASK in known:
        extras["turns"] = _turns([row[: shape[1]] for row in known[COMPLETION_MASK]], shape[1])
        lengths = [len(row) for row in known[COMPLETION_MASK]]
        versions = known.get(POLICY_VERSIONS)
        if versions is None and POLICY_VERSION in known:
            pairs = zip(known[POLICY_VERSION], lengths, strict=True)
            versions = [[version] * length for version, length in pairs]
        if versions is not None:
            lags = [rollouts.steps[row] - np.asarray(one, np.int64) for row, one in zip(wanted, versions, strict=True)]
            extras["version_lags"] = padded([lag[: shape[1]] for lag in lags], width=shape[1], fill=-1).astype(np.int64)
    return extras


def _turns(masks: list[list[bool]], width: int) -> Any:
    """(B, T) turn of each trainable token: tokens that the policy did not sample end a turn; -1 on those."""
    mask = padded(masks, width=width, fill=0.0).astype(bool)
    begins = mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    return np.where(mask, begins.cumsum(axis=1) - 1, -1)
