from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from trl_offpolicy.diagnosis.report import page
from trl_offpolicy.diagnosis.report.plots import Panel
from trl_offpolicy.diagnosis.report.summary import summarize_run

EVIL = "<script>alert('x')</script> & \"q\""


class Balance(HTMLParser):
    """Checks that every tag is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _check(html: str) -> None:
    parser = Balance()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert "<script" not in html


def test_all_text_is_escaped() -> None:
    pieces = [
        page.render_run_info({EVIL: EVIL, "versions": {EVIL: EVIL}}),
        page.render_note(EVIL),
        page.render_panel(Panel(EVIL, "", EVIL)),
        page.render_rows([EVIL], [([EVIL], "<code>safe</code>")]),
        page.render_section(EVIL, "<p>body</p>"),
    ]
    html = page.render_page(EVIL, pieces)
    _check(html)
    assert "&lt;script&gt;" in html and "<code>safe</code>" in html


def test_page_is_readable_on_a_phone_and_loads_nothing() -> None:
    html = page.render_page("t", [])
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    assert "max-width" in html and "prefers-color-scheme: dark" in html
    assert "http" not in html and "@import" not in html and "url(" not in html


def test_run_info_flattens_nested_fields() -> None:
    html = page.render_run_info({"versions": {"torch": "2.9", "trl": "1.16"}, "preset": None})
    assert "<td>torch 2.9, trl 1.16</td>" in html and "<td>–</td>" in html
    assert page.render_run_info({}) == ""


def test_summary_table_shows_both_sides_with_their_numbers(write_run: Any) -> None:
    metrics = {"step": 1, "offpolicy/mismatch/kl_k3": 0.25, "offpolicy/kept/kl_k3": 0.125}
    html = page.render_summary(summarize_run(write_run([metrics])))
    _check(html)
    assert html.count('<td>before</td><td class="num">0.2500</td>') == 1
    assert html.count('<td>after</td><td class="num">0.1250</td>') == 1
    assert 'rowspan="2">KL k3 <span class="soft">nats/token</span>' in html
    assert "KL(sampler||trainer)" in html
