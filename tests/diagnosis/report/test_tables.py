"""The script of a report that sorts and filters, run by node on the page as it is written."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trl_offpolicy.diagnosis.report import report, rollout_plots
from trl_offpolicy.diagnosis.report.demo import DEMO_RUN
from trl_offpolicy.diagnosis.report.page import SCRIPT

NODE = shutil.which("node") or ""
DOM = Path(__file__).with_name("small_dom.js")
FIND = """
const found = (title) => page.querySelectorAll("section").find((one) => one.querySelector("h2").textContent === title);
const cells = (section, column) => section.querySelector("tbody").rows
  .filter((row) => row.classList.contains("rule") && !row.hidden).map((row) => row.cells[column].textContent);
const order = () => found("Worst responses").querySelector("[data-by]").children
  .filter((one) => !one.hidden).map((one) => one.dataset.values);
const type = (section, text) => {
  const field = section.querySelector("input");
  field.value = text;
  field.fire("input");
};
const pressed = (section, name) => section.querySelectorAll("button").find((one) => one.textContent.startsWith(name));
"""

needs_node = pytest.mark.skipif(not NODE, reason="no node on this machine")


class Tree(HTMLParser):
    """The document as nested mappings, for small_dom.js."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.root: dict[str, Any] = {"tag": "document", "attributes": {}, "children": []}
        self._open = [self.root]
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        node = {"tag": tag, "attributes": {name: value or "" for name, value in attrs}, "children": []}
        self._open[-1]["children"].append(node)
        if tag not in ("meta", "br"):
            self._open.append(node)

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1]["children"].append(data)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The report of the demo's run, without the figures, which take seconds to draw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw_step_figures", lambda log: ())
        patch.setattr(rollout_plots, "draw_rollout_figures", lambda rollouts: ())
        path = report.write_report(DEMO_RUN, tmp_path_factory.mktemp("page") / "report.html")
    yield path.read_text(encoding="utf-8")


def run(html: str, steps: str) -> Any:
    """What the steps return, with ``page`` loaded and the helpers of FIND."""
    body = re.sub(r"<svg.*?</svg>", "", html[html.index("<body>") : html.rindex("</html>")], flags=re.DOTALL)
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)
    assert script is not None
    said = {"page": Tree(body).root, "script": script[1], "steps": f"let page = load();{FIND}{steps}"}
    done = subprocess.run([NODE, str(DOM)], input=json.dumps(said), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_script_loads_and_sends_nothing_and_makes_no_markup_of_text() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|write\(|eval|Function|setTimeout", text)
    assert not re.search(r"fetch|XMLHttp|Socket|import|https?:|\.src|href", text)
    assert "</script" not in text and "<!--" not in text and "{{" not in text and "{%" not in text and "{#" not in text


@needs_node
def test_a_column_is_sorted_up_and_down_and_back(html: str) -> None:
    found = run(
        html,
        """
        const section = found("Largest log-ratios"), head = section.querySelectorAll("th")[3], said = [];
        for (let click = 0; click < 4; click += 1) {
          said.push([head.getAttribute("aria-sort"), cells(section, 3)]);
          head.querySelector("button").fire("click");
        }
        return said;
        """,
    )
    written = [float(value) for value in found[0][1]]
    assert [aria for aria, _ in found] == [None, "ascending", "descending", None]
    assert [float(value) for value in found[1][1]] == sorted(written)
    assert [float(value) for value in found[2][1]] == sorted(written, reverse=True) != sorted(written)
    assert found[3][1] == found[0][1]


@needs_node
def test_rows_that_belong_together_stay_together_and_what_is_missing_is_last(html: str) -> None:
    """A token's text stays below it, "after" below "before"; one column at a time is marked as sorted."""
    found = run(
        html,
        """
        const tokens = found("Largest log-ratios"), summary = found("Summary");
        const pairs = () => tokens.querySelector("tbody").rows.map((row) => row.textContent.trim());
        const before = pairs();
        pressed(tokens, "token id").fire("click");
        pressed(tokens, "step").fire("click");
        pressed(tokens, "step").fire("click");
        const marked = tokens.querySelectorAll("th").map((one) => one.getAttribute("aria-sort"));
        const rows = () => summary.querySelector("tbody").rows.map((row) => row.cells[0].textContent);
        const whole = summary.querySelectorAll("button")[4], sorted = [];
        for (let click = 0; click < 2; click += 1) { whole.fire("click"); sorted.push([cells(summary, 4), rows()]); }
        return [before, pairs(), cells(tokens, 5), marked, sorted];
        """,
    )
    before, after, places, marked, sorted_twice = found
    pairs = [set(zip(rows[::2], rows[1::2], strict=True)) for rows in (before, after)]
    assert before != after and pairs[0] == pairs[1]
    assert [[int(part) for part in place.split("/")] for place in places] == sorted(
        ([int(part) for part in place.split("/")] for place in places), reverse=True
    )
    assert marked == [None] * 5 + ["descending"]
    for (values, rows), reverse in zip(sorted_twice, (False, True), strict=True):
        numbers = [float(value.split()[0]) for value in values if value != "–"]
        assert numbers == sorted(numbers, reverse=reverse) and len(numbers) > 8
        assert values[len(numbers) :] == ["–"] * (len(values) - len(numbers)) != []
        assert all(rows[place - 1] != "after" for place, row in enumerate(rows) if row == "after")


@needs_node
def test_the_worst_responses_are_sorted_by_what_is_said_of_them(html: str) -> None:
    found = run(
        html,
        """
        const section = found("Worst responses"), step = pressed(section, "step"), said = [order()];
        step.fire("click"); said.push(order(), [step.getAttribute("aria-pressed"), step.getAttribute("aria-label")]);
        pressed(section, "tokens").fire("click");
        said.push(order(), [step.getAttribute("aria-pressed"), step.getAttribute("aria-label")]);
        return said;
        """,
    )
    written, by_step, on, by_tokens, off = found
    assert by_step == sorted(written, key=lambda one: int(one.split(";")[1])) != written
    assert by_tokens == sorted(written, key=lambda one: int(one.split(";")[4]))
    assert on == ["true", "step, ascending"] and off == ["false", "step"]


@needs_node
def test_a_filter_leaves_what_holds_the_text_and_says_how_many(html: str) -> None:
    found = run(
        html,
        """
        const section = found("Worst responses"), said = [], status = section.querySelector("[role]");
        const count = section.querySelectorAll("[role]").find((one) => one.getAttribute("role") === "status");
        for (const text of ["STEP 13,", "nowhere", "(", ""]) {
          type(section, text);
          said.push([order(), count.textContent]);
        }
        return [section.querySelector("input").getAttribute("aria-label"), ...said];
        """,
    )
    label, some, none, sign, every = found
    assert label == "Filter: Worst responses"
    assert len(some[0]) == 2 and all(one.split(";")[1] == "13" for one in some[0]) and some[1] == "2 of 8"
    assert none == [[], "0 of 8"] and sign[1].endswith(" of 8") and len(every[0]) == 8 and every[1] == ""


@needs_node
def test_what_was_chosen_outlives_the_renewal_of_a_watched_page(html: str) -> None:
    found = run(
        html,
        """
        pressed(found("Worst responses"), "step").fire("click");
        type(found("Largest log-ratios"), "15 / ");
        const seen = () => [order(), cells(found("Largest log-ratios"), 5)], before = seen();
        page = load();
        return [before, seen(), found("Largest log-ratios").querySelector("input").value];
        """,
    )
    before, after, text = found
    assert before == after and text == "15 / " and after[1] and all(one.startswith("15 / ") for one in after[1])
