"""Decides what to print and do after a logged row: verdict, collapse risk, controllers. It depends on no trainer.

:meth:`Supervisor.observe` is a pure function of a state and a row, so ranks that see the same row decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trl_offpolicy.control.actions import Action
from trl_offpolicy.control.controllers import LEARNING_RATE_SCALE
from trl_offpolicy.control.escalation import CORRECTION_LEVEL, LEVELS
from trl_offpolicy.control.risk import collapse_risk
from trl_offpolicy.control.spec import ControlSpec
from trl_offpolicy.control.staleness import LAG
from trl_offpolicy.diagnosis.verdict.course import COMPARED
from trl_offpolicy.diagnosis.verdict.judge import WINDOW, Diagnosis, diagnose
from trl_offpolicy.diagnosis.verdict.rows import FEWEST
from trl_offpolicy.diagnosis.verdict.tree import NOT_JUDGED, SEVERITIES
from trl_offpolicy.run_folder.layout import EVAL_PREFIX, STEP
from trl_offpolicy.run_folder.run_data import MetricsLog
from trl_offpolicy.stats import PREFIX

CONTROL_METRICS = (
    "verdict", "collapse_risk", "risk_chi2", "risk_ess", "risk_clip", "risk_length", "risk_gradient",
    "learning_rate_scale", "correction_level", "resyncs",
)  # fmt: skip
"""Prefix of the metrics that control logs: ``offpolicy/control/<name>``."""
LENGTH_SURGE = f"{PREFIX}rollout/length_surge"
"""Key of the mean response length over that of ``length_window`` steps before."""

_WHOLE_ROWS = WINDOW + 5
"""Rows that are kept whole: those that a verdict reads, and a few more."""
_FOR_LONG = (STEP, *COMPARED, LAG)
"""The numbers that older rows keep: what the verdict compares with earlier rows, and the lag, whose window the user
sets."""


@dataclass(frozen=True)
class ControlState:
    """What a run remembers between logging steps. A checkpoint holds it as :meth:`as_dict`.

    Args:
        rows: the last logged rows.
        controllers: the state of each controller, by name.
        said: ``cause:severity`` of each printed finding, with the step at which it was last seen.
        alarms: logging steps in a row with an alarm of policy ``stop``.
    """

    rows: tuple[dict[str, float], ...] = ()
    controllers: Mapping[str, Any] = field(default_factory=dict)
    said: Mapping[str, int] = field(default_factory=dict)
    alarms: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The state as plain values, for a checkpoint."""
        states = {name: asdict(state) for name, state in self.controllers.items()}
        return {"rows": list(self.rows), "controllers": states, "said": dict(self.said), "alarms": self.alarms}


@dataclass(frozen=True)
class Outcome:
    """The decisions after a logging step.

    Args:
        lines: lines to print.
        actions: actions to list in ``actions.jsonl``.
        metrics: numbers to log.
        learning_rate_scale: factor on the learning rate from the next step on.
        correction_level: rung of the escalation's ladder from the next step on; at most the top one.
        resync: True if the next generation must wait for another sync.
        stop: why the run should end with a checkpoint; empty = it should not.
    """

    lines: tuple[str, ...] = ()
    actions: tuple[Action, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    learning_rate_scale: float = 1.0
    correction_level: int = 0
    resync: bool = False
    stop: str = ""


@dataclass(frozen=True)
class Supervisor:
    """Watches a run by the rules of ``spec``."""

    spec: ControlSpec

    def start(self) -> ControlState:
        """The state of a new run: no rows, and the start state of every controller."""
        return ControlState(controllers={item.name: item.start() for item in self.spec.controllers})

    def restore(self, state: Mapping[str, Any]) -> ControlState:
        """The state from :meth:`ControlState.as_dict`. A controller that is not in it starts anew."""
        started = self.start()
        known = state["controllers"]
        controllers = {
            name: type(new)(**known[name]) if name in known else new for name, new in started.controllers.items()
        }
        return ControlState(tuple(state["rows"]), controllers, dict(state["said"]), state["alarms"])

    def settings(self, state: ControlState) -> Outcome:
        """The settings that are in force, without lines, actions or metrics."""
        scale = math.prod(getattr(item, "scale", 1.0) for item in state.controllers.values())
        level = getattr(state.controllers.get("escalation"), "level", 0)
        return Outcome(learning_rate_scale=scale, correction_level=min(level, len(LEVELS) - 2))

    def observe(self, state: ControlState, step: int, logs: Mapping[str, Any]) -> tuple[ControlState, Outcome]:
        """The next state and the decisions after one logging step.

        Args:
            state: the state before it.
            step: optimizer steps so far.
            logs: the logged row of training, as the trainer has it; never a row of an evaluation.
        """
        state = replace(state, rows=self._remember(state.rows, step, logs))
        log = MetricsLog(state.rows)
        diagnosis, risk = diagnose(log, self.spec.thresholds), collapse_risk(log, self.spec.thresholds)
        state, lines = self._say(state, step, diagnosis)
        state, actions = self._act(state, log, step)
        state, stop = self._judge(state, diagnosis, risk.score, actions, step)
        if stop is not None:  # several controllers may ask for a stop; only one reason is listed
            actions = (*(action for action in actions if action.what != "stop"), stop)
        in_force = self.settings(state)
        metrics = {
            # -1: nothing was logged from which engine and trainer can be compared
            "verdict": -1.0 if diagnosis.verdict == NOT_JUDGED else float(SEVERITIES.index(diagnosis.verdict)),
            "collapse_risk": risk.score,
            **{f"risk_{name}": value for name, value in risk.parts.items()},
            **self._settings_logged(state, in_force),
        }
        logged = {f"{PREFIX}control/{name}": value for name, value in metrics.items()}
        if "rollout/length_surge" in diagnosis.readings:  # there are enough rows to compare
            logged[LENGTH_SURGE] = diagnosis.readings["rollout/length_surge"]
        return state, replace(
            in_force,
            lines=(*lines, *(action.line() for action in actions)),
            actions=actions,
            metrics=logged,
            resync=any(action.what == "resync" for action in actions),
            stop="" if stop is None else stop.why,
        )

    def _settings_logged(self, state: ControlState, in_force: Outcome) -> dict[str, float]:
        """Metrics of the settings that a controller may move."""
        moved = {item.setting for item in self.spec.controllers}
        # setting -> name of its metric, and value; for an escalation the level, which may exceed the ladder's top
        values = {
            LEARNING_RATE_SCALE: ("learning_rate_scale", in_force.learning_rate_scale),
            CORRECTION_LEVEL: ("correction_level", float(getattr(state.controllers.get("escalation"), "level", 0))),
            "resync": ("resyncs", float(getattr(state.controllers.get("resync"), "asked", 0))),
        }
        return dict(logged for setting, logged in values.items() if setting in moved)

    def _remember(
        self, rows: tuple[dict[str, float], ...], step: int, logs: Mapping[str, Any]
    ) -> tuple[dict[str, float], ...]:
        """The rows that are still needed, with the new one last."""
        row: dict[str, float] = {STEP: step}
        for key, value in logs.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and key != STEP and not key.startswith(EVAL_PREFIX):
                row[key] = float(value)
        kept = [item for item in rows if item[STEP] < step]  # a resumed run repeats its steps
        # every checkpoint holds these rows, so older ones keep only a few numbers
        older, fewest = kept[:-_WHOLE_ROWS], len(kept) - self.spec.remembered_rows
        old = [
            item
            for place, item in enumerate(older)
            # the run's first rows stay: the verdict compares with them what grows or falls over a run
            if place < FEWEST or place >= fewest or item[STEP] >= step - self.spec.history
        ]
        thinned = [{key: item[key] for key in _FOR_LONG if key in item} for item in old]
        return (*thinned, *kept[-_WHOLE_ROWS:], row)

    def _say(self, state: ControlState, step: int, diagnosis: Diagnosis) -> tuple[ControlState, tuple[str, ...]]:
        """A line for each new finding. A finding that was absent for a window of readings is new again."""
        first = len(state.rows) == 1
        oldest = int(state.rows[-WINDOW:][0][STEP])
        said = {name: at for name, at in state.said.items() if at >= oldest}
        lines = []
        for finding in diagnosis.findings:
            name = f"{finding.cause}:{finding.severity}"
            if name not in said:
                lines.append(
                    f"step {step}: {finding.severity}  {finding.about.title}: {finding.symptom}. Fix: {finding.fix}"
                )
            said[name] = step
        # "ok" is printed at the start of a run, and when all findings are gone for good
        if not diagnosis.findings and (first or (state.said and not said)):
            lines.append(f"step {step}: {diagnosis.line()}")
        return replace(state, said=said), tuple(lines)

    def _act(self, state: ControlState, log: MetricsLog, step: int) -> tuple[ControlState, tuple[Action, ...]]:
        controllers, actions = dict(state.controllers), []
        for item in self.spec.controllers:
            controllers[item.name], action = item.step(controllers[item.name], log, step)
            actions += [] if action is None else [action]
        return replace(state, controllers=controllers), tuple(actions)

    def _judge(
        self, state: ControlState, diagnosis: Diagnosis, risk: float, actions: tuple[Action, ...], step: int
    ) -> tuple[ControlState, Action | None]:
        """The next state, and a stop action if the run should end."""
        asked = next((action for action in actions if action.what == "stop"), None)  # by a controller
        # an escalation's top level is a systems fix, which no setting of the run can provide
        escalation = self.spec.escalation
        if asked is None and escalation is not None and escalation.systems == "stop":
            top = next((a for a in actions if a.what == CORRECTION_LEVEL and a.after == len(LEVELS) - 1), None)
            asked = None if top is None else Action(step, escalation.name, "stop", 0, 1, top.why)
        if self.spec.policy != "stop":
            return state, asked
        alarm = diagnosis.verdict == "critical" or risk >= self.spec.risk
        state = replace(state, alarms=state.alarms + 1 if alarm else 0)
        if state.alarms < self.spec.patience:
            return state, None
        critical = diagnosis.line() if diagnosis.verdict == "critical" else f"collapse risk {risk:.2f}"
        why = f"{critical} ({state.alarms} logging steps in a row)"
        return replace(state, alarms=0), Action(step, "verdict", "stop", 0, 1, why)
