"""Scores the same tokens in engine and trainer at the same weights, and names what makes them differ."""

from trl_offpolicy.diagnosis.probe.options import ProbeOptions
from trl_offpolicy.diagnosis.probe.probe import ProbeResult, run_probe

__all__ = ["ProbeOptions", "ProbeResult", "run_probe"]
