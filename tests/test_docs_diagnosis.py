"""docs/diagnosis.md against the code: the tree's picture, the tables and the example."""

import re
from pathlib import Path

import draw_diagnosis
import pytest
from drawing import to_svg

from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.diagnosis.tree import TREE

PAGE = draw_diagnosis.PAGE.read_text()


@pytest.mark.parametrize("name", draw_diagnosis.MAPS)
def test_the_tables_are_those_of_the_code(name):
    shown = PAGE.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- end of {name} -->")[0]
    assert shown == draw_diagnosis.MAPS[name]()


def test_the_picture_is_the_one_the_script_draws():
    there = (Path(draw_diagnosis.__file__).parent / "pictures" / "diagnosis_tree.svg").read_text()
    again = to_svg(*draw_diagnosis.PICTURES["diagnosis_tree"])
    texts = [re.findall(r">([^<>]+)</(?:text|tspan|title)>", svg) for svg in (there, again)]
    assert texts[0] == texts[1]
    for step in TREE:
        assert CAUSES[step.cause].title in texts[0]


def test_the_example_prints_what_the_page_says(capsys):
    code = PAGE.split("```python\n")[1].split("```")[0]
    exec(compile(code, "docs/diagnosis.md", "exec"), {})
    assert capsys.readouterr().out.strip() == code.rsplit("# ", 1)[1].strip()
