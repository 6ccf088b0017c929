"""The pages as documents: closed tags, nothing from a run taken as HTML or script, nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError
from toy_policy import make

from trl_offpolicy.diagnosis import write_report
from trl_offpolicy.diagnosis.attribution.attribute import attribute
from trl_offpolicy.diagnosis.attribution.breakdown import break_down
from trl_offpolicy.diagnosis.attribution.recommend import Recommendation
from trl_offpolicy.diagnosis.probe.options import ProbeOptions
from trl_offpolicy.diagnosis.probe.page import render_probe
from trl_offpolicy.diagnosis.probe.probe import ProbeResult, measure
from trl_offpolicy.diagnosis.report.page import SCRIPT, TEMPLATES, flat_texts, render_page

EVIL = "<script>alert('x')</script> & \"q\""


class Balance(HTMLParser):
    """Checks that every tag is closed in order, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        self.handlers += [name for name, _ in attrs if name.startswith("on") or (tag == "script" and name == "src")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def checked(html: str, scripts: Sequence[str] = ()) -> str:
    """The text of a page that is well formed and holds these scripts and no other."""
    parser = Balance()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert parser.scripts == list(scripts) and html.count("<script") == len(scripts) and parser.handlers == []
    return parser.text


def ours() -> list[str]:
    """The scripts of a report."""
    return [SCRIPT.read_text(encoding="utf-8")]


@pytest.mark.parametrize("decode", [None, lambda ids: EVIL])
def test_a_report_escapes_everything_that_comes_from_a_run(
    write_run: Any, rollout_parts: Any, decode: Callable[[list[int]], str] | None
) -> None:
    metrics = [{"step": 1, "reward": 0.5, EVIL: 1.0, "offpolicy/mismatch/kl_k3": 0.3}]
    parts = [[{**row, "prompt": EVIL, "completion": EVIL} for row in rows] for rows in rollout_parts]
    info = {"model": EVIL, EVIL: {EVIL: EVIL}, "declared": {"engine": {"dtype": EVIL}, "trainer": {"dtype": "x"}}}

    text = checked(write_report(write_run(metrics, parts, info), decode=decode).read_text(encoding="utf-8"), ours())

    assert "</script>" not in ours()[0]  # it would end there
    # three examples with both texts, three tokens, run.json's key and values
    assert text.count(EVIL) >= 3 * 2 + 3 + 4


def test_a_probe_page_escapes_everything_that_comes_from_a_run() -> None:
    evidence = make("precision")
    result = ProbeResult(
        options=ProbeOptions(model=EVIL, adapter=EVIL),
        metrics=measure(evidence),
        evidence=evidence,
        attribution=attribute(evidence),
        recommendation=Recommendation("measure", {}, EVIL, (EVIL,)),
        breakdowns=break_down(evidence, decode=lambda token: "a"),
        completions=[EVIL] * 8,
    )
    assert checked(render_probe(result)).count(EVIL) == 2 + 3 + 2  # advice, examples, settings


def test_the_policy_of_a_report_allows_its_script_by_its_hash_and_no_other(write_run: Any) -> None:
    html = write_report(write_run([{"step": 1, "reward": 0.5}])).read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert script is not None and policy is not None
    hashed = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    assert rules["script-src"] == f"'sha256-{hashed}'" and rules["default-src"] == "'none'"
    assert "script-src" not in render_page("waiting.html", title="t", live="", error="e")


def test_pages_are_readable_on_a_phone_and_load_nothing(write_run: Any) -> None:
    html = write_report(write_run([{"step": 1, "reward": 0.5}])).read_text(encoding="utf-8")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    assert "max-width" in html and "prefers-color-scheme: dark" in html
    assert "@import" not in html and "url(" not in html.replace("url(#", "")
    for path in TEMPLATES.iterdir():
        assert "http:" not in path.read_text() and "https:" not in path.read_text()
    scripts = re.findall(r"<script.*", "".join(path.read_text() for path in TEMPLATES.iterdir()))
    assert scripts == ['<script>{% include "tables.js" %}']


def test_a_value_that_a_template_names_and_nobody_gives_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="title"):
        render_page("page.html")


def test_only_drawn_figures_are_taken_as_html() -> None:
    marked = [
        (path.name, line.strip())
        for path in sorted(Path(TEMPLATES).iterdir())
        for line in path.read_text().splitlines()
        if re.search(r"\|\s*safe", line)
    ]
    assert marked == [("pieces.html", "{% macro drawn(svg) %}{{ svg | safe }}{% endmacro %}")]


def test_run_info_is_flattened() -> None:
    info = {"versions": {"torch": "2.9", "trl": "1.16"}, "preset": None, "seed": 0, "note": ""}
    assert flat_texts(info) == {"versions": "torch 2.9, trl 1.16", "preset": "–", "seed": "0", "note": "–"}


def test_summary_table_shows_both_sides_with_their_numbers(write_run: Any) -> None:
    metrics = {"step": 1, "offpolicy/mismatch/kl_k3": 0.25, "offpolicy/kept/kl_k3": 0.125}
    html = write_report(write_run([metrics])).read_text(encoding="utf-8")
    assert "KL(sampler||trainer)" in checked(html, ours())
    assert html.count('<td>before</td><td class="num">0.2500</td>') == 1
    assert html.count('<td>after</td><td class="num">0.1250</td>') == 1
    assert 'rowspan="2">KL k3 <span class="soft">nats/token</span>' in html
