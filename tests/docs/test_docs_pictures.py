"""The pictures of docs/{control,engines,async,speed}.md are those that the scripts beside the pages draw."""

import re
from pathlib import Path

import draw_async
import draw_control
import draw_engines
import draw_speed
import pytest
import torch
from drawing import to_svg

DOCS = Path(draw_control.__file__).parent
SCRIPTS = {"async": draw_async, "control": draw_control, "engines": draw_engines, "speed": draw_speed}
CASES = [(page, name) for page, script in SCRIPTS.items() for name in script.PICTURES]
MAX_BYTES = 120_000


def words(svg):
    return re.findall(r">([^<>]+)</(?:text|tspan|title)>", svg)


def coordinates(svg):
    """All numbers of the paths, and where markers stand."""
    drawn = re.findall(r'\b(?:d|x|y|transform)="([^"]*)"', svg)
    return torch.tensor([float(number) for one in drawn for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", one)])


@pytest.mark.parametrize(("page", "name"), CASES)
def test_a_picture_drawn_again_is_the_same(page, name):
    """Same words, same numbers to a point (of some 500): fonts and libraries may move a line by a hair."""
    there = (DOCS / "pictures" / f"{name}.svg").read_text()
    again = to_svg(*SCRIPTS[page].PICTURES[name])

    assert len(there) < MAX_BYTES
    assert words(there) == words(again)
    old, new = coordinates(there), coordinates(again)
    assert len(old) == len(new)
    assert (old - new).abs().max() < 1.0


@pytest.mark.parametrize(("page", "name"), CASES)
def test_it_is_on_its_page_with_words_for_who_cannot_see_it(page, name):
    (text,) = re.findall(rf"!\[([^\]]+)\]\(pictures/{name}\.svg\)", (DOCS / f"{page}.md").read_text())
    assert len(text) > 20
