"""Explains the numbers of a run folder in words: verdict, causes, summary table and HTML report.

matplotlib, pyarrow and rich are imported only when a figure, a rollout file or a table needs them.
"""

from trl_offpolicy.diagnosis.report.report import write_report
from trl_offpolicy.diagnosis.report.statement import describe_run
from trl_offpolicy.diagnosis.report.summary import (
    RunSummary,
    SummaryRow,
    print_summary,
    summarize_log,
    summarize_run,
)
from trl_offpolicy.run_folder.run_data import MetricsLog, read_metrics, read_run_info

__all__ = [
    "MetricsLog",
    "RunSummary",
    "SummaryRow",
    "describe_run",
    "print_summary",
    "read_metrics",
    "read_run_info",
    "summarize_log",
    "summarize_run",
    "write_report",
]
