"""Watches a run while it trains and acts on what it sees: from thresholds to actions, without any trainer.

``trl_offpolicy.trl.control`` applies it in TRL, ``lightning_module.control`` in Lightning.
"""

from trl_offpolicy.control.acceptance import AcceptUpdate, UpdateGate
from trl_offpolicy.control.actions import ACTIONS_FILE, Action, append_actions, read_actions
from trl_offpolicy.control.controllers import Controller, ESSStep, LengthGuard
from trl_offpolicy.control.escalation import Escalation
from trl_offpolicy.control.learning_rate import LearningRateScale
from trl_offpolicy.control.resync import Resync
from trl_offpolicy.control.risk import Risk, collapse_risk
from trl_offpolicy.control.spec import ControlSpec, parse_control
from trl_offpolicy.control.staleness import StalenessCeiling
from trl_offpolicy.control.supervisor import CONTROL_METRICS, LENGTH_SURGE, ControlState, Outcome, Supervisor

__all__ = [
    "ACTIONS_FILE",
    "CONTROL_METRICS",
    "LENGTH_SURGE",
    "AcceptUpdate",
    "Action",
    "ControlSpec",
    "ControlState",
    "Controller",
    "ESSStep",
    "Escalation",
    "LearningRateScale",
    "LengthGuard",
    "Outcome",
    "Resync",
    "Risk",
    "StalenessCeiling",
    "Supervisor",
    "UpdateGate",
    "append_actions",
    "collapse_risk",
    "parse_control",
    "read_actions",
]
