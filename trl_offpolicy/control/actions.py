"""Actions of controllers: an action, its reverse, and the file in the run folder that lists them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trl_offpolicy.run_folder.strict import dump_json

ACTIONS_FILE = "actions.jsonl"
"""File in the run folder with one action per line."""


@dataclass(frozen=True)
class Action:
    """One change of one setting.

    Args:
        step: optimizer steps so far; the change applies from the next step on.
        controller: name of the controller that acts.
        what: the setting: ``learning_rate_scale``, ``correction_level``, ``resync`` or ``stop``.
        before: its value before the action.
        after: its value after the action.
        why: one sentence with the numbers that led to the action.
    """

    step: int
    controller: str
    what: str
    before: float
    after: float
    why: str

    def reverse(self, step: int, why: str = "taken back by hand") -> Action:
        """The action that takes this one back at ``step``.

        Raises:
            ValueError: the action is a weight sync, which changes no setting and cannot be taken back.
        """
        if self.what == "resync":
            raise ValueError("what must be a setting, but got 'resync': a sync that was made changes no setting.")
        return replace(self, step=step, before=self.after, after=self.before, why=why)

    def line(self) -> str:
        """One line for a terminal: step, controller, change and reason."""
        return f"step {self.step}: {self.controller}: {self.what} {self.before:g} -> {self.after:g}: {self.why}"


def append_actions(path: Path, actions: tuple[Action, ...]) -> None:
    """Append one JSON line per action."""
    with path.open("a") as file:
        file.writelines(dump_json(asdict(action)) + "\n" for action in actions)


def read_actions(path: Path) -> tuple[Action, ...]:
    """The actions of a run; empty if there is no file. A last line that a kill cut short is skipped."""
    if not path.is_file():
        return ()
    actions = []
    for line in path.read_text().splitlines():
        try:
            actions.append(Action(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return tuple(actions)
