"""The recorded faulty run that ``trl-offpolicy demo`` shows (made by ``scripts/record_demo.py``)."""

from __future__ import annotations

from pathlib import Path

DEMO_RUN = Path(__file__).parent / "demo_run"
STORY = (
    "A recorded run: SmolLM2-135M learns one-digit sums by GRPO with LoRA, but the engine never gets the new weights. "
    "The loss looks fine and the reward is the old policy's. A product mask drops what has drifted."
)
NEXT = (
    "On a run of yours: trl-offpolicy doctor RUN_DIR. Before training: trl-offpolicy probe --model MODEL. "
    "In this trainer the fault stops the run at the first sync that does not arrive (engine: {check_sync: true}, "
    "the default); it was switched off here."
)


def show_demo(output: str | Path) -> Path:
    """Print what the doctor says about the recorded run and write its report.

    Args:
        output: HTML file to write.

    Returns:
        The file written.
    """
    from trl_offpolicy.diagnosis.doctor import examine, print_examination
    from trl_offpolicy.diagnosis.report.report import write_report

    print(f"{STORY}\n")
    print_examination(examine(DEMO_RUN))
    path = write_report(DEMO_RUN, output)
    print(f"report: {path}\n{NEXT}")
    return path
