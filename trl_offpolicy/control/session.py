"""Controls one run: judges each logged row and applies the decisions. It is the same for every trainer.

A trainer's adapter (``trl_offpolicy.trl.control``, ``lightning_module.control``) says when a row is logged, and does
what only it can do: print, agree over ranks, swap the correction, sync again. The adapter also stops the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from trl_offpolicy.control.acceptance import Parameters, UpdateGate, gate_of
from trl_offpolicy.control.actions import Action, append_actions
from trl_offpolicy.control.gradient_cosine import ConsecutiveCosine
from trl_offpolicy.control.learning_rate import LearningRateScale
from trl_offpolicy.control.spec import ControlSpec
from trl_offpolicy.control.supervisor import ControlState, Outcome, Supervisor
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.measure import Measure
from trl_offpolicy.diagnosis.verdict.rows import FEWEST
from trl_offpolicy.objective.measure import gradient_variance
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.run_folder.layout import ACTIONS_FILE, METRICS_FILE, STEP
from trl_offpolicy.run_folder.run_data import read_metrics
from trl_offpolicy.stats import PREFIX

COSINE_PREVIOUS = f"{PREFIX}gradient/cosine_previous"
GRADIENTS_PROJECTED = f"{PREFIX}control/gradients_projected"
UPDATES_REJECTED = f"{PREFIX}control/updates_rejected"
SESSION_METRICS = (GRADIENTS_PROJECTED, UPDATES_REJECTED)
"""Keys that a session logs beside those of its supervisor (``CONTROL_METRICS``), if it is configured to."""
_UPDATES = "updates"  # what judges them, in the state of a session


class ControlSession:
    """Watches a run and, with policy ``stop`` or ``act``, stops or changes it.

    Args:
        spec: the parsed ``control`` option, without the controllers that cannot work in this run.
        say: prints a line.
        broadcast: returns the main rank's row on every rank; all ranks call it.
        base: the configured correction, which is level 0 of an escalation.
        correct: puts a correction into use, unless it is in use already; None = the trainer takes no correction.
        admits: whether the objective takes a correction; see :func:`admitted_by`.
        resync: makes the next generation wait for another sync.
    """

    def __init__(
        self,
        spec: ControlSpec,
        *,
        say: Callable[[str], object],
        broadcast: Callable[[dict[str, Any]], dict[str, Any]],
        base: Correction | None = None,
        correct: Callable[[Correction], None] | None = None,
        admits: Callable[[Correction], bool] = lambda correction: True,
        resync: Callable[[], None] | None = None,
    ) -> None:
        self.spec = spec
        self.scale = LearningRateScale()
        self.stop = ""
        """Why the run should end with a checkpoint, by the last row; empty = it should not."""
        self._supervisor = Supervisor(spec)
        self._say, self._broadcast, self._correct, self._resync = say, broadcast, correct, resync
        self._ladder = () if spec.escalation is None else spec.escalation.ladder(base or Correction(), admits)
        self._records: Path | None = None
        self._gate: UpdateGate | None = None
        self._updates: dict[str, Any] = {}  # of a checkpoint; the gate may be made after that was read
        self._is_main = True
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.state: ControlState = self._supervisor.start()
        limit = self.spec.max_gradient_cosine
        self._cosine = ConsecutiveCosine(limit) if self.spec.gradient_cosine or limit is not None else None

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The session's state as plain values, for a checkpoint."""
        updates = {} if self._gate is None else {_UPDATES: self._gate.state_dict()}
        return {**self.state.as_dict(), **updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint; an empty state begins a new run."""
        self._begin_anew()
        self._updates = dict(state.get(_UPDATES, {}))
        if state:
            self.state = self._supervisor.restore(state)
        if self._gate is not None and self._updates:
            self._gate.load_state_dict(self._updates)
        self._put_in_force(self._supervisor.settings(self.state))

    # --------------------------------------------------------------------------------------------------------- events

    def begin(self, folder: Path, step: int, *, optimizer: Any = None, records: bool = True) -> None:
        """Begin training, or continue it after ``step`` optimizer steps.

        Args:
            folder: folder of the run. Its last rows are read if the checkpoint held no control state.
            step: optimizer steps so far.
            optimizer: the optimizer whose learning rate a controller may scale.
            records: whether to list actions in ``folder``.
        """
        self._records = folder / ACTIONS_FILE if records else None
        if self.spec.moves_learning_rate and optimizer is not None:
            self.scale.attach(optimizer)
        if step > 0 and not self.state.rows and (folder / METRICS_FILE).is_file():
            rows = tuple(row for row in read_metrics(folder).rows if row[STEP] <= step)
            first = rows[: min(FEWEST, max(0, len(rows) - self.spec.history))]  # with which the verdict compares
            self.state = replace(self.state, rows=(*first, *rows[-self.spec.history :]))

    def gate(self, parameters: Callable[[], Parameters], *, is_main: bool) -> UpdateGate | None:
        """What judges each synced update of this run; None if no controller does. Called by all ranks, once.

        Args:
            parameters: the trainable parameters by name, whole on this rank.
            is_main: True if this rank prints and writes.
        """
        self._is_main = is_main
        self._gate = gate_of(self.spec.controllers, parameters, self._note)
        if self._gate is not None and self._updates:
            self._gate.load_state_dict(self._updates)
        return self._gate

    def _note(self, action: Action) -> None:
        """Print and record an action that was taken between two logged rows."""
        if self._is_main:
            self._say(f"[control] {action.line()}")
            self._record((action,))

    def _record(self, actions: tuple[Action, ...]) -> None:
        if actions and self._records is not None:
            self._records.parent.mkdir(parents=True, exist_ok=True)
            append_actions(self._records, actions)

    @property
    def compares_gradients(self) -> bool:
        """True if :meth:`compare_gradient` does anything."""
        return self._cosine is not None

    def compare_gradient(self, parameters: Iterable[Tensor], *, in_parts: bool = False) -> None:
        """Measure, and bound, the cosine to the previous step's gradient, if configured. Call it before the step.

        Args:
            parameters: those that learn.
            in_parts: each rank holds plain parts of the gradients (FSDP1).
        """
        if self._cosine is not None:
            self._cosine.update(parameters, in_parts=in_parts)

    def observe(
        self, step: int, logs: Mapping[str, Any], *, responses: int, world_size: int, is_main: bool
    ) -> dict[str, float]:
        """Judge a row of training. Decisions apply from the next optimizer step on.

        Args:
            step: optimizer steps so far, including that of the row.
            logs: the row.
            responses: responses per optimizer step, on all ranks.
            world_size: number of ranks. Unless the policy is ``warn``, all of them call this.
            is_main: True if this rank prints and writes.

        Returns:
            Further numbers to log. Afterwards ``stop`` says whether the run should end.
        """
        added = gradient_variance(logs, responses=responses)
        if self._cosine is not None:
            if (share := self._cosine.projected()) is not None:
                added[GRADIENTS_PROJECTED] = share
            if (cosine := self._cosine.value()) is not None:
                added[COSINE_PREVIOUS] = cosine
        row = {**logs, **added}
        # the ranks' rows may differ (times do), so all ranks decide by the main rank's row
        if self.spec.policy != "warn" and world_size > 1:
            row = self._broadcast(row)
        self.state, outcome = self._supervisor.observe(self.state, step, row)
        self._put_in_force(outcome)
        self.stop = outcome.stop
        if is_main:
            for line in outcome.lines:
                self._say(f"[control] {line}")
            self._record(outcome.actions)
        gated = {} if self._gate is None else {UPDATES_REJECTED: float(self._gate.rejected)}
        return {**added, **outcome.metrics, **gated}

    def end(self) -> None:
        """Remove the hooks from the optimizer."""
        self.scale.detach()

    def _put_in_force(self, outcome: Outcome) -> None:
        self.scale.value = outcome.learning_rate_scale
        if self._correct is not None and self._ladder:
            self._correct(self._ladder[outcome.correction_level])
        if outcome.resync and self._resync is not None:
            self._resync()


def admitted_by(objective: Objective) -> Callable[[Correction], bool]:
    """Whether ``objective`` takes a correction in place of its own, e.g. no weight that its loss holds already."""

    def admits(correction: Correction) -> bool:
        try:
            replace(objective, correction=correction)
        except ValueError:
            return False
        return True

    return admits


def lacking(
    correction: Correction | None, *, has_sampler: bool, needs_whole_batch: bool, resync_needs: str, accept_needs: str
) -> dict[str, str]:
    """The controllers that cannot work in a run: ``{name: what it would need}``.

    Args:
        correction: the configured correction.
        has_sampler: True if an engine reports log-probs of its samples.
        needs_whole_batch: True if the correction is computed before the generation batch is split.
        resync_needs: what a resync would need and this run lacks; empty = nothing.
        accept_needs: the same for accepting updates.
    """
    needs = {"resync": resync_needs, "accept_update": accept_needs}
    missing = {name: what for name, what in needs.items() if what}
    if not has_sampler:
        missing["escalation"] = "an engine with log-probs of its own"
    elif needs_whole_batch:
        missing["escalation"] = "a correction of row scope"
    # with no weights, and no escalation that could add some, the ESS describes no correction
    if "escalation" in missing and not (correction or Correction()).weights:
        missing["ess_step"] = "a correction with a weight"
    return _unmeasured(correction or Correction(), proved=not accept_needs) | missing


def _unmeasured(correction: Correction, *, proved: bool) -> dict[str, str]:
    """The controllers whose numbers ``correction.measure`` leaves out; ``proved``: the agreement of syncs is logged."""
    distances: tuple[Measure, ...] = ("mismatch", "total")
    missing: dict[str, str] = {}
    if not any(map(correction.measures, distances)):
        missing["escalation"] = "mismatch or total in correction.measure"
    if not any(map(correction.measures, (*distances, "staleness"))):
        missing["ess_step"] = "staleness, mismatch or total in correction.measure"
    if not proved and not any(correction.measures(group, whole=True) for group in distances):
        missing["resync"] = "correction.measure: full, or proofs of the syncs"
    return missing
