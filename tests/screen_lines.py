"""What a run printed as a warning, apart from what is known and not the user's to mend."""

from __future__ import annotations

import re

WARNING = re.compile(r"warn|deprecat|\bfail|\berror\b|traceback|^\[[WE]\d{4} ", re.IGNORECASE)
"""A line that a reader takes for a warning or worse, from Python, a logger or C++."""

KNOWN = {
    r"Setting accelerator to CPU\. If you have GPU": "DeepSpeed, which only the environment of the slow tests has",
    r"UserWarning: VecISA dlopen probe for \w+ hung after": "torch's probe of a busy machine",
}
"""Lines that any run of the tests may print."""

LAUNCHED = {
    **KNOWN,
    r"^To avoid this warning pass in values for each of": "accelerate launch; `make quickstart` gives the values",
}
"""Lines of a run that ``accelerate launch`` starts as the README has it."""


def unknown_warnings(screen: str, known: dict[str, str]) -> list[str]:
    """The lines of ``screen`` that look like a warning and match no pattern of ``known``.

    Python prints the source line under a warning: such a line belongs to the one above it.

    Args:
        screen: what a run printed.
        known: a regular expression for each line that may stand there, with the reason.
    """
    found, above = [], ""
    for line in screen.splitlines():
        source_of_known = re.match(r"  \S", line) and re.search(r":\d+: \w*Warning: ", above)
        if WARNING.search(line) and not source_of_known and not any(re.search(one, line) for one in known):
            found.append(line)
        above = line
    return found
