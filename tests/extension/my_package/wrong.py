"""What is refused, and each for another reason."""

from dataclasses import dataclass

import trl_offpolicy as op


class NotAPart:
    pass


class NotADataclass(op.Weight):
    def weigh(self, inputs: op.TermInputs) -> op.Weighed:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Unfinished(op.Weight):
    power: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Stranger:
    """The method, but not the base and so none of its defaults."""

    def weigh(self, inputs: op.TermInputs) -> op.Weighed:
        raise NotImplementedError


class HalfAnEngine:
    def generate(self) -> None:
        raise NotImplementedError


a_function = len
