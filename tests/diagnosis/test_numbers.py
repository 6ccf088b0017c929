from __future__ import annotations

import pytest

from trl_offpolicy.diagnosis.numbers import format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (1.00021, "1.0002"),
        (-0.5, "-0.5000"),
        (123.456, "123.46"),
        (0.00041234, "0.000412"),
        (-2e-6, "-2.00e-6"),
        (3.5e7, "3.50e7"),
    ],
)
def test_format_number(value: float | None, text: str) -> None:
    assert format_number(value) == text
