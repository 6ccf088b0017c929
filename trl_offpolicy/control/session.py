"""One run under control: each logged row is judged, and what follows is put in force. The same for every trainer.

A trainer's adapter (``trl_offpolicy.trl.control``, ``lightning_module.control``) says when a row is logged, and lends
what only it can do: print, agree over ranks, swap the correction, sync anew. How a run is stopped stays with it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from trl_offpolicy.control.actions import append_actions
from trl_offpolicy.control.gradient_cosine import ConsecutiveCosine
from trl_offpolicy.control.learning_rate import LearningRateScale
from trl_offpolicy.control.spec import ControlSpec
from trl_offpolicy.control.supervisor import ControlState, Outcome, Supervisor
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.objective.measure import gradient_variance
from trl_offpolicy.run_folder.layout import ACTIONS_FILE, METRICS_FILE, STEP
from trl_offpolicy.run_folder.run_data import read_metrics
from trl_offpolicy.stats import PREFIX

COSINE_PREVIOUS = f"{PREFIX}gradient/cosine_previous"


class ControlSession:
    """Watches a run and, with policy ``stop`` or ``act``, does something about it.

    Args:
        spec: what ``control`` says, without the controllers that cannot work in this run.
        say: prints a line.
        broadcast: gives every rank the row of the main one; all ranks call it.
        base: the configured correction, level 0 of an escalation.
        correct: takes a correction into use, if it is not the one in use; None = the trainer has none of its own.
        resync: makes the next generation wait for a sync of its own.
    """

    def __init__(
        self,
        spec: ControlSpec,
        *,
        say: Callable[[str], object],
        broadcast: Callable[[dict[str, Any]], dict[str, Any]],
        base: Correction | None = None,
        correct: Callable[[Correction], None] | None = None,
        resync: Callable[[], None] | None = None,
    ) -> None:
        self.spec = spec
        self.scale = LearningRateScale()
        self.stop = ""
        """Why the run should end with a checkpoint, by the last row; empty = it should not."""
        self._supervisor = Supervisor(spec)
        self._say, self._broadcast, self._correct, self._resync = say, broadcast, correct, resync
        self._ladder = () if spec.escalation is None else spec.escalation.ladder(base or Correction())
        self._records: Path | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.state: ControlState = self._supervisor.start()
        self._cosine = ConsecutiveCosine() if self.spec.gradient_cosine else None

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self.state.as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; with an empty state begin anew."""
        self._begin_anew()
        if state:
            self.state = self._supervisor.restore(state)
        self._put_in_force(self._supervisor.settings(self.state))

    # --------------------------------------------------------------------------------------------------------- events

    def begin(self, folder: Path, step: int, *, optimizer: Any = None, records: bool = True) -> None:
        """Training begins, or goes on after ``step`` optimizer steps.

        Args:
            folder: of the run; its last rows are taken where the checkpoint had no state of a control.
            step: optimizer steps so far.
            optimizer: whose learning rate a controller may scale.
            records: list actions in ``folder``.
        """
        self._records = folder / ACTIONS_FILE if records else None
        if self.spec.moves_learning_rate and optimizer is not None:
            self.scale.attach(optimizer)
        if step > 0 and not self.state.rows and (folder / METRICS_FILE).is_file():
            rows = tuple(row for row in read_metrics(folder).rows if row[STEP] <= step)
            self.state = replace(self.state, rows=rows[-self.spec.history :])

    def compare_gradient(self, parameters: Iterable[Tensor]) -> None:
        """With that of the optimizer step before, if asked for; called before the optimizer steps."""
        if self._cosine is not None:
            self._cosine.update(parameters)

    def observe(
        self, step: int, logs: Mapping[str, Any], *, responses: int, world_size: int, is_main: bool
    ) -> dict[str, float]:
        """Judge a row of training and put in force what follows, from the next optimizer step on.

        Args:
            step: optimizer steps so far, that of the row included.
            logs: the row.
            responses: of one optimizer step, on all ranks.
            world_size: ranks; where they act, they all call this.
            is_main: this rank prints and writes.

        Returns:
            What is to be logged besides. ``stop`` then says whether the run should end.
        """
        added = gradient_variance(logs, responses=responses)
        if self._cosine is not None and (cosine := self._cosine.value()) is not None:
            added[COSINE_PREVIOUS] = cosine
        row = {**logs, **added}
        # the rows of the ranks may differ (times do): where something is done about it, all decide by the main one's
        if self.spec.policy != "warn" and world_size > 1:
            row = self._broadcast(row)
        self.state, outcome = self._supervisor.observe(self.state, step, row)
        self._put_in_force(outcome)
        self.stop = outcome.stop
        if is_main:
            for line in outcome.lines:
                self._say(f"[control] {line}")
            if outcome.actions and self._records is not None:
                self._records.parent.mkdir(parents=True, exist_ok=True)
                append_actions(self._records, outcome.actions)
        return {**added, **outcome.metrics}

    def end(self) -> None:
        """Leave the optimizer alone."""
        self.scale.detach()

    def _put_in_force(self, outcome: Outcome) -> None:
        self.scale.value = outcome.learning_rate_scale
        if self._correct is not None and self._ladder:
            self._correct(self._ladder[outcome.correction_level])
        if outcome.resync and self._resync is not None:
            self._resync()


def lacking(
    correction: Correction | None, *, has_sampler: bool, needs_whole_batch: bool, resync_needs: str
) -> dict[str, str]:
    """What controllers that cannot work in a run would need, by their names.

    Args:
        correction: the configured one.
        has_sampler: something samples that has log-probs of its own.
        needs_whole_batch: the correction is computed before the generation batch is split.
        resync_needs: what would have weights to send anew; empty = the run has it.
    """
    missing = {"resync": resync_needs} if resync_needs else {}
    if not has_sampler:
        missing["escalation"] = "an engine with log-probs of its own"
    elif needs_whole_batch:
        missing["escalation"] = "a correction of row scope"
    # without weights and without an escalation that could add some, the ESS is that of no correction
    if "escalation" in missing and not (correction or Correction()).weights:
        missing["ess_step"] = "a correction with a weight"
    return missing
