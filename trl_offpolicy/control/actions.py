"""What controllers do: an action, its reverse, and the file in the run folder that lists them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ACTIONS_FILE = "actions.jsonl"
"""File in the run folder with one action a line."""


@dataclass(frozen=True)
class Action:
    """One change of one setting.

    Args:
        step: optimizer steps so far; the change holds from the next one on.
        controller: whose.
        what: ``learning_rate_scale``, ``correction_level``, ``resync`` or ``stop``.
        before: the setting before.
        after: the setting after.
        why: one sentence with the numbers that it was decided on.
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
            ValueError: a weight sync that was made cannot be taken back; it changes no setting.
        """
        if self.what == "resync":
            raise ValueError("what must be a setting, but got 'resync': a sync that was made changes no setting.")
        return replace(self, step=step, before=self.after, after=self.before, why=why)

    def line(self) -> str:
        """For a terminal."""
        return f"step {self.step}: {self.controller}: {self.what} {self.before:g} -> {self.after:g}: {self.why}"


def append_actions(path: Path, actions: tuple[Action, ...]) -> None:
    """Append one JSON line an action."""
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(action)) + "\n" for action in actions)


def read_actions(path: Path) -> tuple[Action, ...]:
    """The actions of a run; none where there is no file. A last line cut short by a kill is passed over."""
    if not path.is_file():
        return ()
    actions = []
    for line in path.read_text().splitlines():
        try:
            actions.append(Action(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return tuple(actions)
