"""From numbers to words: the summary table and the HTML report of a run folder.

matplotlib, pyarrow and rich are imported only when a figure, a rollout file or a table asks for them.
"""

from trl_offpolicy.diagnosis.report import write_report
from trl_offpolicy.diagnosis.run_data import MetricsLog, read_metrics, read_run_info
from trl_offpolicy.diagnosis.statement import describe_run
from trl_offpolicy.diagnosis.summary import (
    RunSummary,
    SummaryRow,
    print_summary,
    summarize_log,
    summarize_run,
)

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
