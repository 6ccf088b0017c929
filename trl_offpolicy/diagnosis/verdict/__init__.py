"""Finds symptoms and their causes in the metrics of a run."""

from trl_offpolicy.diagnosis.verdict.judge import Diagnosis, Finding, diagnose

__all__ = ["Diagnosis", "Finding", "diagnose"]
