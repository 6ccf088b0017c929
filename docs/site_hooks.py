"""MkDocs hooks: files of the checkout that are pages of the site too, and links between all of them.

On GitHub the pages in docs/ link to files outside (recipes, benchmarks, source). In the site the READMEs, CONTRIBUTING
and CHANGELOG are pages as well; a link to any other file of the checkout becomes its name, without a link.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(([^)\s]+)\)")

_NAMES = "GRPO TIS GSM8K MoE OPSM FSDP2 LoRA IcePop CoT 7B"
SPELLED = {name.lower(): name for name in _NAMES.split()} | {"zero3": "ZeRO-3"}
"""Words of folder names as they are written in the navigation."""


@cache
def outside_pages() -> dict[str, str]:
    """Path in the checkout -> path in the site, of the pages that do not stand in docs/."""
    readmes = sorted(
        path.relative_to(ROOT)
        for folder in ("recipes", "benchmarks")
        for path in ((ROOT / folder / "README.md"), *(ROOT / folder).glob("*/README.md"))
        if path.is_file()
    )
    pages = {path.as_posix(): f"{path.parent.as_posix().replace('/', '_')}.md" for path in readmes}
    return pages | {name: name.lower() for name in ("CONTRIBUTING.md", "CHANGELOG.md")}


@cache
def outside_pictures() -> list[str]:
    """Pictures that stand beside those pages; they have the same path in the site."""
    found = (path for folder in ("recipes", "benchmarks") for path in (ROOT / folder).rglob("*.*"))
    return sorted(path.relative_to(ROOT).as_posix() for path in found if path.suffix in (".svg", ".png"))


def source_of(page: str) -> str:
    """Path in the checkout of a page of the site."""
    return {there: here for here, there in outside_pages().items()}.get(page, f"docs/{page}")


def page_of(path: str) -> str | None:
    """Path in the site of a file of the checkout; None = it is not in the site."""
    if path.startswith("docs/") and (ROOT / path).is_file() and not path.endswith((".py", ".json")):
        return path.removeprefix("docs/")
    return outside_pages().get(path) or (path if path in outside_pictures() else None)


def section(start: str) -> list[dict[str, str]]:
    """The pages from one folder, each under the name of its own folder; the quickstart first."""
    found = {Path(here).parent.name: there for here, there in outside_pages().items() if here.startswith(start)}
    names = sorted(found, key=lambda name: (name not in ("quickstart", "benchmarks"), name))
    return [{label(name): found[name]} for name in names]


def label(folder: str) -> str:
    """``grpo_tis_gsm8k`` as GRPO TIS GSM8K."""
    words = " ".join(SPELLED.get(word, word) for word in folder.split("_"))
    return words[0].upper() + words[1:]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of recipes and benchmarks into the navigation."""
    assert config.nav is not None
    config.nav += [
        {"Recipes": section("recipes/")},
        {"Measurements": section("benchmarks/")},
        {"Project": ["contributing.md", "changelog.md"]},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that do not stand in docs/."""
    for here, there in (*outside_pages().items(), *((path, path) for path in outside_pictures())):
        files.append(File.generated(config, there, abs_src_path=str(ROOT / here)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links of the checkout become links of the site; Python sessions get their own highlighting."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [linked(markdown[end : fence.start()], page.file.src_uri), coloured(fence[0])]
        end = fence.end()
    return "".join([*parts, linked(markdown[end:], page.file.src_uri)])


def coloured(fence: str) -> str:
    """A block that starts with ``>>>`` is a session."""
    return re.sub(r"\A```python\n(?=>>> )", "```pycon\n", fence)


def linked(text: str, page: str) -> str:
    """``text`` with the links that lead out of docs/ (or into it from outside) put right."""
    folder = Path(source_of(page)).parent

    def replace(match: re.Match[str]) -> str:
        picture, shown, link = match.groups()
        target = urlsplit(link)
        if target.scheme or not target.path:
            return match[0]
        path = os.path.normpath(folder / target.path)
        there = page_of(path) or page_of(f"{path}/README.md")
        if there is not None:
            relative = os.path.relpath(there, Path(page).parent)
            return f"{picture}[{shown}]({relative}{'#' + target.fragment if target.fragment else ''})"
        if picture or not (ROOT / path).exists():
            return match[0]  # mkdocs says that it leads nowhere
        return shown if shown == f"`{path}`" else f"{shown} (`{path}`)"

    return LINK.sub(replace, text)
