"""docs/site_hooks.py: links of the checkout become links of the site."""

import pytest
import site_hooks


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("index.md", "[a](metrics.md#definitions)", "[a](metrics.md#definitions)"),
        ("index.md", "[a](../recipes/quickstart/README.md#measured)", "[a](recipes_quickstart.md#measured)"),
        ("index.md", "[a](../recipes/quickstart)", "[a](recipes_quickstart.md)"),
        ("index.md", "[a](../CONTRIBUTING.md)", "[a](contributing.md)"),
        ("api/index.md", "[a](../metrics.md)", "[a](../metrics.md)"),
        ("recipes_quickstart.md", "[a](../../docs/metrics.md)", "[a](metrics.md)"),
        ("recipes_lightning.md", "[a](../quickstart/README.md)", "[a](recipes_quickstart.md)"),
        ("recipes_lightning.md", "![a](../../docs/pictures/band.svg)", "![a](pictures/band.svg)"),
        (
            "engines.md",
            "[`engine.py`](../trl_offpolicy/engines/engine.py)",
            "`engine.py` (`trl_offpolicy/engines/engine.py`)",
        ),
        ("contributing.md", "[`mkdocs.yml`](mkdocs.yml)", "`mkdocs.yml`"),
        ("index.md", "[a](nowhere.md), [b](https://example.org/x.md), [c](#here)", None),
        ("index.md", "![a](../README.md)", None),
    ],
)
def test_links(page: str, text: str, expected: str | None) -> None:
    assert site_hooks.linked(text, page) == (text if expected is None else expected)


def test_code_is_left_alone() -> None:
    class Page:
        file = type("File", (), {"src_uri": "index.md"})

    link = "[a](../CONTRIBUTING.md)"
    text = f"{link}\n```python\n>>> {link}\n```\n```yaml\n{link}\n```\n"
    changed = f"[a](contributing.md)\n```pycon\n>>> {link}\n```\n```yaml\n{link}\n```\n"
    assert site_hooks.on_page_markdown(text, page=Page()) == changed  # type: ignore[arg-type]


def test_folders_are_spelled() -> None:
    assert site_hooks.label("grpo_tis_gsm8k") == "GRPO TIS GSM8K"
    assert site_hooks.label("lora_server") == "LoRA server"
    assert site_hooks.section("recipes/")[0] == {"Quickstart": "recipes_quickstart.md"}
