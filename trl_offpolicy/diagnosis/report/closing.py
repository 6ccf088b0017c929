"""Prints verdict and summary and writes the report at the end of a run."""

from __future__ import annotations

import logging
from pathlib import Path

from trl_offpolicy.diagnosis.report.examples import Decode
from trl_offpolicy.diagnosis.report.report import make_report, print_report, save_report
from trl_offpolicy.run_folder.layout import METRICS_FILE, ROLLOUTS_FILE

logger = logging.getLogger(__name__)


def closing_report(folder: Path, *, decode: Decode | None) -> None:
    """Print verdict and summary, write the report, and print where the files are. A failure here is logged, not raised.

    Args:
        folder: folder of the run.
        decode: turns token ids into text for the report; None shows the ids.
    """
    try:
        report = make_report(folder, decode=decode)
        print_report(report)
        path = save_report(report, folder)
        print(f"report:   {path}\nmetrics:  {folder / METRICS_FILE}\nrollouts: {folder / ROLLOUTS_FILE}")
    except Exception:
        logger.exception("The run is complete, but its report failed; try: trl-offpolicy report %s", folder)
