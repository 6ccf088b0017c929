"""The docs site: it builds without a warning or a network, its links lead somewhere, nothing comes from outside."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from site_hooks import outside_pages
from site_roles import ROLE

ROOT = Path(__file__).resolve().parents[2]
BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
LOADS = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "object": "data",
    "use": "href",
}
"""Elements that make a browser load something, and where they say what."""
API = {
    "trl_offpolicy": ("advantages", "losses", "presets", "proximal", "shaping"),
    "trl_offpolicy.correction.terms": (),
    "trl_offpolicy.objective.losses": ("RatioLevel", "WeightUse"),
    "trl_offpolicy.objective.advantages": (),
    "trl_offpolicy.objective.proximal": ("Average",),
    "trl_offpolicy.objective.shaping": (),
    "trl_offpolicy.presets": (),
    "trl_offpolicy.metrics": (),
    "trl_offpolicy.diagnosis": (),
    "trl_offpolicy.control": (),
    "lightning_module": (),
}
"""Packages whose ``__all__`` is documented, and what of it is no object of its own: modules and type aliases."""


class Page(HTMLParser):
    """Anchors, links and loaded files of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADS and LOADS[tag] in given:
            self.loads.append(given[LOADS[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` does, with every way out closed."""
    folder = tmp_path_factory.mktemp("site")
    nowhere = "http://127.0.0.1:9"
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "http_proxy": nowhere, "https_proxy": nowhere}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return folder


@cache
def parsed(path: Path) -> Page:
    return Page(path)


@pytest.mark.integration
@pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine")
@pytest.mark.parametrize("page", ["index.html", "api/index.html"])
def test_a_browser_searches_the_site_on_disk(page: str, site: Path, tmp_path: Path) -> None:
    """Over file://, where a browser loads no JSON and starts no Worker."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    how = [f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--dump-dom"]
    command = [BROWSER, *flags, *how, f"{(site / page).as_uri()}?q=routing+replay"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = re.findall(r'href="file://[^"]*/([\w/]+\.html)[^"]*"[^>]*class="md-search-result__link"', dom)
    assert "routing.html" in found, dom[-2000:]


def pages(site: Path) -> list[Path]:
    found = sorted(site.rglob("*.html"))
    assert len(found) > 20
    return found


def ragged(text: str) -> list[str]:
    """Rows of tables that have more or fewer cells than their header; a ``|`` inside a cell is written ``\\|``."""
    wrong, columns = [], 0
    for line in re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).splitlines():
        cells = len(re.split(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        columns = columns if columns and cells else cells
        wrong += [line] * (cells != columns)
    return wrong


def test_every_row_has_the_columns_of_its_header() -> None:
    assert ragged("| a | b |\n|---|---|\n| 1 | 2 |\n\n| a |\n|---|\n| \\| |\n") == []
    assert ragged("| a | b |\n|---|---|\n| 1 | |x| |\n") == ["| 1 | |x| |"]
    sources = [*(ROOT / "docs").rglob("*.md"), *(ROOT / path for path in outside_pages())]
    assert {str(path.relative_to(ROOT)): rows for path in sources if (rows := ragged(path.read_text()))} == {}


def pinned(*files: str) -> dict[str, str]:
    """{package: version} of lists in constraints/."""
    lines = "\n".join((ROOT / "constraints" / file).read_text() for file in files)
    return dict(re.findall(r"^([\w.-]+)==([^;\s]+)", lines, flags=re.MULTILINE))


def test_the_list_of_packages_is_complete() -> None:
    """They are installed with --no-deps: what one of them needs must stand in a list, in a version that it takes."""
    known = {canonicalize_name(name): version for name, version in pinned("cpu.txt", "test.txt", "docs.txt").items()}
    count = 0
    for name in pinned("docs.txt"):
        for requirement in map(Requirement, requires(name) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                count += 1
                needed = canonicalize_name(requirement.name)
                assert needed in known, f"constraints/docs.txt lacks {requirement}, for {name}"
                assert requirement.specifier.contains(known[needed]), f"{name} wants {requirement}"
    assert count > 20


def broken_links(site: Path) -> list[str]:
    """Links to a file or an anchor that is not there."""
    broken = []
    for page in sorted(site.rglob("*.html")):
        for link in (*parsed(page).links, *parsed(page).loads):
            target = urlsplit(link)
            if target.scheme or target.netloc or page.name == "404.html":
                continue
            path = (page.parent / unquote(target.path)).resolve() if target.path else page
            path = path / "index.html" if path.is_dir() else path
            if not path.is_file() or (path.suffix == ".html" and unquote(target.fragment) not in parsed(path).anchors):
                broken.append(f"{page.relative_to(site)}: {link}")
    return broken


def foreign(site: Path) -> list[str]:
    """Scripts, styles, fonts and pictures of another host, and diagrams that would fetch their renderer."""
    found = []
    for page in sorted(site.rglob("*.html")):
        loads = [
            load for load in parsed(page).loads if urlsplit(load).netloc or urlsplit(load).scheme not in ("", "data")
        ]
        found += [f"{page.relative_to(site)}: {load}" for load in loads]
        found += [f"{page.relative_to(site)}: mermaid"] * ('class="mermaid"' in page.read_text())
    for file in (*site.rglob("*.html"), *site.rglob("*.css")):
        outside = re.findall(r"(?:@import\s+['\"(]*|url\(['\"]?)(?:https?:)?//[^'\")]*", file.read_text())
        found += [f"{file.relative_to(site)}: {one}" for one in outside]
    return found


@pytest.mark.integration
def test_internal_links_lead_somewhere(site: Path) -> None:
    assert len(list(site.rglob("*.html"))) > 20
    assert broken_links(site) == []


@pytest.mark.integration
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert foreign(site) == []


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    wrong = ("other.html", "#there", "https://a.org/x.html", "page.html#nowhere", "../up.html")
    (tmp_path / "page.html").write_text(
        '<h1 id="there"></h1>'
        + "".join(f'<a href="{link}"></a>' for link in wrong)
        + '<script src="//cdn.org/a.js"></script><link href="https://cdn.org/a.css"><img src="no.png">'
        + "<style>@import 'https://cdn.org/b.css'; a { background: url(//cdn.org/c.png) }</style>"
    )
    bad = ["other.html", "page.html#nowhere", "../up.html", "no.png"]
    assert broken_links(tmp_path) == [f"page.html: {link}" for link in bad]
    assert [one.rpartition("cdn.org/")[2] for one in foreign(tmp_path)] == ["a.js", "a.css", "b.css", "c.png"]


@pytest.mark.integration
def test_external_links_are_well_formed(site: Path) -> None:
    """Without a network only their form can be checked."""
    found = {link for page in pages(site) for link in parsed(page).links if urlsplit(link).scheme}
    form = re.compile(r"(https://[\w.-]+\.[a-z]{2,}|http://127\.0\.0\.1:\d+)(/\S*)?")
    assert [link for link in found if not form.fullmatch(link)] == []


@pytest.mark.integration
def test_every_page_of_the_checkout_is_in_the_site(site: Path) -> None:
    sources = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert {path.with_suffix(".html") for path in sources} <= {path.relative_to(site) for path in pages(site)}
    readmes = [path.parent.name for path in (ROOT / "recipes").glob("*/README.md")]
    assert readmes and all((site / f"recipes_{name}.html").is_file() for name in readmes)


@pytest.mark.integration
@pytest.mark.parametrize("package", API)
def test_public_names_are_in_the_reference(site: Path, package: str) -> None:
    """Under any of the paths at which the name can be imported."""
    anchors = set().union(*(parsed(page).anchors for page in (site / "api").glob("*.html")))
    shown = {one.rpartition(".")[2] for one in anchors if one.startswith(package.partition(".")[0])}
    names = set(import_module(package).__all__) - set(API[package])
    assert sorted(names - shown) == []


def exists(path: str) -> bool:
    """``package.module.Class.method`` can be imported, or is a field of its class."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            if name in getattr(found, "__dataclass_fields__", {}) or name in getattr(found, "__annotations__", {}):
                return True
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def test_roles_in_docstrings_name_what_exists() -> None:
    """The site drops a link to what it does not hold without a word."""
    wrong, count = [], 0
    for path in (path for package in ("trl_offpolicy", "lightning_module") for path in (ROOT / package).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for _, name in ROLE.findall(path.read_text()):
            count += 1
            if name.startswith("."):
                name = (module if path.stem == "__init__" else module.rpartition(".")[0]) + name
            if not (exists(name) or exists(f"{module}.{name}") or any(exists(one) for one in owners(module, name))):
                wrong.append(f"{module}: {name}")
    assert count > 100 and wrong == []


def owners(module: str, name: str) -> list[str]:
    """A bare method name belongs to a class of its module."""
    return [f"{module}.{cls}.{name}" for cls, one in vars(import_module(module)).items() if isinstance(one, type)]


@pytest.mark.integration
def test_docstrings_are_rendered(site: Path) -> None:
    """No role and no session is left as text."""
    for page in (site / "api").glob("*.html"):
        text = re.sub(r"<[^>]+>", "", page.read_text())
        assert not re.search(r":(class|func|meth|data|mod|attr):`", text), page
    terms = (site / "api" / "presets.html").read_text()
    assert '<span class="gp">&gt;&gt;&gt; </span>' in terms
