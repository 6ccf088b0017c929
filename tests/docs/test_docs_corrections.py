"""docs/corrections.md against the code: its examples run, its tables are those of the code, its pictures are drawn."""

import dataclasses
import doctest
import re
import warnings
from functools import cache
from pathlib import Path

import draw_corrections
import pytest
import torch
import yaml
from drawing import to_svg

import trl_offpolicy as op
from trl_offpolicy.correction import terms
from trl_offpolicy.correction.measure import noise_floor
from trl_offpolicy.correction.terms.keep import STATISTIC_LEVELS
from trl_offpolicy.correction.terms.weights import WEIGHT_LEVELS
from trl_offpolicy.functional.levels import LEVELS, TOKEN_LEVELS
from trl_offpolicy.functional.masks import STATISTICS
from trl_offpolicy.presets.parsing import KEEP_TYPES, WEIGHT_TYPES, parse_correction
from trl_offpolicy.types import RATIOS, SCOPES

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "corrections.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SETUP = BLOCKS[0]
TYPES = {cls.__name__: (name, cls) for name, cls in (WEIGHT_TYPES | KEEP_TYPES).items()}
MAX_LINES, MAX_BYTES = 8, 60_000


def run(code, name="docs/corrections.md"):
    """Run a doctest block after the page's helper; returns its variables."""
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS, verbose=False)
    space = {}
    for part in (SETUP, code):
        test = doctest.DocTestParser().get_doctest(part, space, name, None, None)
        assert test.examples, "The block has no example."
        runner.run(test, clear_globs=False)
        space = test.globs
    assert runner.failures == 0, "See the difference above."
    return space


def chapter(title):
    """Text of a ``##`` chapter."""
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)[1]


@cache
def sections():
    """{class name: text} of the ``###`` sections under Weights and Keep terms."""
    found = {}
    for title in ("Weights", "Keep terms"):
        parts = re.split(r"^### (\w+)\n", chapter(title), flags=re.MULTILINE)[1:]
        found |= dict(zip(parts[::2], parts[1::2], strict=True))
    return found


def table(first_column):
    """{first cell: row} of the table whose header starts with ``first_column``."""
    lines = PAGE.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return rows
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        rows[cells[0].strip("`")] = cells
    return rows


def presets_in(text):
    """Names in backticks that look like a preset of a known source."""
    sources = {name.partition("/")[0] for name in op.presets.names() if "/" in name}
    return set(re.findall(rf"`((?:{'|'.join(map(re.escape, sources))})/[\w-]+)`", text))


@cache
def preset(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return op.presets.get(name)


# ------------------------------------------------------------------------------------------------------------- examples


@pytest.mark.parametrize("number", range(1, len(BLOCKS)))
def test_examples_run_as_shown(number):
    run(BLOCKS[number], f"block {number}")


def test_examples_are_short():
    assert [block for block in BLOCKS if len(block.splitlines()) > MAX_LINES] == []
    assert all("```python" in text for text in sections().values())


def test_yaml_and_python_are_the_same_correction():
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    spec = yaml.safe_load(text)["offpolicy"]
    after = PAGE[PAGE.index(text) :]
    code = re.search(r"```python\n(.*?)```", after, flags=re.DOTALL)[1]
    assert parse_correction(spec["correction"], where="offpolicy.correction") == run(code)["correction"]


# ------------------------------------------------------------------------------------------------- terms and presets


@pytest.mark.parametrize(("page", "name"), draw_corrections.TABLES)
def test_the_tables_of_terms_are_those_of_the_code(page, name):
    """``python docs/draw_corrections.py`` writes them."""
    shown = page.read_text().split(f"<!-- {name} -->\n")[1].split(f"\n<!-- end of {name} -->")[0]
    assert shown == draw_corrections.TABLES[page, name]()


def test_every_section_is_of_a_term_and_every_term_is_public():
    exported = {name for name in terms.__all__ if dataclasses.is_dataclass(getattr(terms, name))} - {"TermInputs"}
    assert set(sections()) <= exported == set(TYPES)
    assert exported <= set(op.__all__)
    assert set(re.findall(r"^### (\w+Weight)\n", chapter("Weights"), flags=re.MULTILINE)) <= set(sections())


@pytest.mark.parametrize("name", sorted(sections()))
def test_sections_name_type_fields_and_defaults(name):
    yaml_type, cls = TYPES[name]
    line = " ".join(sections()[name].split("\n\n")[0].split())
    expected = []
    for item in dataclasses.fields(cls):
        required = item.default is dataclasses.MISSING
        text = item.name if required else f"{item.name}={item.default!r}".replace("'", '"')
        expected.append(f"`{text}`")
    assert line.startswith(f"`type: {yaml_type}`. Fields: {', '.join(expected)}. Scope: ")
    scopes = set(re.findall(r"`(\w+)`", line.partition("Scope: ")[2])) & set(SCOPES)
    assert scopes == scopes_of(name)


def scopes_of(name):
    _, cls = TYPES[name]
    if "scope" in {item.name for item in dataclasses.fields(cls)}:
        return {"generation_batch", "micro_batch"}
    if name in ("RatioBand", "DivergenceBand"):
        return {cls(**cls.example, level=level).scope for level in ("token", "group")}
    return {cls(**cls.example).scope}


@pytest.mark.parametrize("name", sorted(sections()))
def test_sections_are_complete(name):
    text = sections()[name]
    for mark in ("Bias, variance", "Source", "Thresholds", "Watch", "Presets"):
        assert text.count(f"- **{mark}**: ") == 1, mark
    assert text.count("![") == 1


@pytest.mark.parametrize("name", sorted(sections()))
def test_presets_of_a_section_use_the_term(name):
    _, cls = TYPES[name]
    line = re.search(r"- \*\*Presets\*\*: (.*?)\n\n", sections()[name], flags=re.DOTALL)[1]
    named = presets_in(line)
    using = {one for one in op.presets.names() if any(isinstance(part, cls) for part in parts_of(preset(one)))}
    assert named <= using
    assert bool(named) == bool(using), "A term without presets says so."


def parts_of(one):
    return () if one.correction is None else (*one.correction.weights, *one.correction.keep)


def test_every_preset_on_the_page_exists():
    named = presets_in(PAGE)
    assert len(named) > 30
    assert named - set(op.presets.names()) == set()
    guide = {row[2] for row in table("you see").values()}
    assert all(presets_in(cell) or cell == "`measure`" for cell in guide) and "measure" in op.presets.names()


# --------------------------------------------------------------------------------------------------------------- tables


def test_levels_are_those_of_the_code():
    rows = table("`level`")
    assert tuple(rows) == LEVELS
    assert {level for level, row in rows.items() if row[2] == "(B, T)"} == set(TOKEN_LEVELS)
    assert all(row[2] in ("(B, T)", "(B, 1)") for row in rows.values())
    assert LEVELS[:6] == WEIGHT_LEVELS and "Weights have the first six levels." in PAGE


def test_statistics_are_those_of_the_code():
    rows = table("statistic")
    assert tuple(rows) == ("ratio", *STATISTICS)
    levels = {name: set(row[3].split(", ")) for name, row in rows.items()}
    assert levels.pop("ratio") == set(LEVELS)
    assert levels == {name: set(allowed) for name, allowed in STATISTIC_LEVELS.items()}


def test_ratios_and_scopes_are_those_of_the_code():
    assert tuple(table("`ratio`")) == RATIOS
    assert tuple(table("scope")) == SCOPES


def test_options_of_a_correction_are_on_the_page():
    for item in dataclasses.fields(op.Correction):
        if item.name != "measure":
            assert f"`{item.name}" in PAGE or f"{item.name}=" in PAGE, item.name


# -------------------------------------------------------------------------------------------------------------- metrics


@cache
def emitted():
    keep = (
        *(op.RatioBand(level=level, low=0.5, high=None) for level in ("token", "sequence_mean")),
        op.DivergenceBand(statistic="k3", high=0.01),
        op.ProbabilityDifferenceMask(),
        op.OutlierVeto(low=1e-4, high=None),
        op.SecondMomentBudget(),
        op.GroupRejection(),
        op.EqualRewards(),
        op.PrefixBudget(),
        op.SuffixVeto(),
        op.OffPolicySequenceMask(max_divergence=0.05),
        op.StalenessBound(max_lag=1),
    )
    correction = op.Correction(weight=op.TruncateWeight(max_weight=2.0), keep=keep, correct_threshold=0.5)
    old = torch.full((2, 3), -1.0)
    batch = op.PolicyBatch(
        per_token_logps=old,
        old_per_token_logps=old,
        sampling_per_token_logps=old,
        completion_mask=torch.ones(2, 3).bool(),
        advantages=torch.ones(2),
        rewards=torch.ones(2),
        group_ids=torch.arange(2),
        group_rewards=torch.tensor([[1.0, 0.0]] * 2),
        policy_versions=torch.zeros(2).long(),
        current_version=0,
    )
    stats = op.Objective(correction=correction)(batch).stats.union(noise_floor(old, old, batch.mask))
    return {key.removeprefix("offpolicy/") for key in stats.compute()}


def test_metrics_on_the_page_are_emitted():
    groups = {key.partition("/")[0] for key in emitted()}
    named = set(re.findall(rf"`((?:{'|'.join(groups)})/[\w/*<>]+)`", PAGE))
    assert len(named) > 20
    for name in named:
        pattern = re.escape(name).replace(r"\*", ".+").replace("<term>", r"\w+")
        assert any(re.fullmatch(pattern, key) for key in emitted()), name


# ------------------------------------------------------------------------------------------------------------- pictures


def test_pictures_are_those_the_script_draws():
    shown = re.findall(r"!\[([^\]]+)\]\(pictures/(\w+)\.svg\)", PAGE)
    linked = set(re.findall(r"\[picture\]\(pictures/(\w+)\.svg\)", PAGE))
    names = {name for _, name in shown} | linked
    assert linked == set(WEIGHT_TYPES) | set(KEEP_TYPES)
    assert names == set(draw_corrections.PICTURES)
    assert {path.stem for path in (DOCS / "pictures").iterdir()} >= names
    assert all(len(text) > 10 for text, _ in shown)


@pytest.mark.parametrize("name", sorted(draw_corrections.PICTURES))
def test_a_picture_drawn_again_is_the_same(name):
    """Same words, same numbers to a point (of some 500): fonts and libraries may move a line by a hair."""
    there = (DOCS / "pictures" / f"{name}.svg").read_text()
    again = to_svg(*draw_corrections.PICTURES[name])

    assert len(there) < MAX_BYTES
    assert "<dc:date>" not in there
    assert words(there) == words(again)
    old, new = coordinates(there), coordinates(again)
    assert len(old) == len(new)
    assert (old - new).abs().max() < 1.0


def words(svg):
    return re.findall(r">([^<>]+)</(?:text|tspan|title)>", svg)


def coordinates(svg):
    """All numbers of the paths, and where markers stand."""
    drawn = re.findall(r'\b(?:d|x|y|transform)="([^"]*)"', svg)
    return torch.tensor([float(number) for one in drawn for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", one)])


def test_both_modes_have_colours():
    for path in (DOCS / "pictures").glob("*.svg"):
        svg = path.read_text()
        assert "prefers-color-scheme: dark" in svg
        bare = re.findall(r"(?:fill|stroke): (#\w{6})(?!; (?:fill|stroke): var)", svg)
        assert bare == [], f"{path.name}: colours without a dark counterpart."


# ----------------------------------------------------------------------------------------------------------- statements


def test_links_inside_the_page_lead_somewhere():
    headings = re.findall(r"^#+ (.*)$", PAGE, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    linked = re.findall(r"\]\(#([\w-]+)\)", PAGE)
    assert linked and set(linked) <= anchors
    assert all((DOCS / path).exists() for path in re.findall(r"\]\(([\w/]+\.(?:md|svg))\)", PAGE))


def test_sources_are_listed():
    listed = set(re.findall(r"^- \[(\w)\] ", PAGE, flags=re.MULTILINE))
    assert set(re.findall(r"\[([A-Z])\](?!\()", PAGE)) == listed
    numbers = set(re.findall(r"\b2\d{3}\.\d{5}\b", PAGE.partition("## Sources")[0]))
    assert numbers == set(re.findall(r"\b2\d{3}\.\d{5}\b", PAGE.partition("## Sources")[2]))


def test_length_trap_as_told():
    """The product and the maximum drop the long, the geometric mean of noise the short, the mean of k3 none."""
    draw = draw_corrections
    noise = draw.noise(400, 2048, 0.1, seed=1)

    def kept(term, length):
        return draw.share(draw.kept(term, of=draw.batch(noise[:, :length]))[:, 0])

    product, worst = (
        op.RatioBand(level="sequence", low=0.5, high=2.0),
        op.DivergenceBand(statistic="k3", level="sequence_max", high=0.05),
    )
    for term in (product, worst):
        assert kept(term, 16) > 0.8 and kept(term, 2048) < 0.2
    assert kept(op.RatioBand(low=0.99, high=1.01), 16) < 0.5 < 0.9 < kept(op.RatioBand(low=0.99, high=1.01), 2048)
    assert min(kept(op.DivergenceBand(statistic="k3", high=0.01), length) for length in (16, 2048)) > 0.95
    stats = op.Correction()(draw.batch(noise)).stats.compute()
    assert stats["offpolicy/mismatch/kl_k3"] == pytest.approx(0.005, rel=0.01)


def test_prefix_bounds_act_evenly_on_a_walk_without_drift():
    draw = draw_corrections
    walks = draw.noise(4000, 100, 0.15, seed=3, mean=0.0)
    held = draw.weigh(op.PrefixWeight(), walks) != draw.weigh(op.RawWeight(level="prefix"), walks)
    shares = held.double().mean(0)
    assert (shares - shares.mean()).abs().max() < 0.025
    fair = draw.noise(4000, 100, 0.15, seed=3)  # mean ratio 1
    bounded, free = draw.weigh(op.PrefixWeight(), fair), draw.weigh(op.RawWeight(level="prefix"), fair)
    assert (bounded > free)[:, -1].double().mean() > (bounded > free)[:, 0].double().mean() + 0.05


def test_a_shape_truncates_nothing():
    stats = op.Correction(weight=op.ShapedWeight(gamma=0.1))(draw_corrections.batch(torch.zeros(1, 4))).stats.compute()
    assert stats["offpolicy/weight/truncated_fraction"] == 0.0


def test_no_difference_means_weight_one_and_nothing_dropped():
    """The page's opening statement, for every weight but the shaped one and every keep term."""
    batch = draw_corrections.batch(
        torch.zeros(4, 3),
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]),
        group_ids=torch.arange(4) // 2,
        group_rewards=torch.tensor([[1.0, 0.0]] * 4),
        policy_versions=torch.zeros(4).long(),
        current_version=0,
    )
    for name, (yaml_type, cls) in TYPES.items():
        if name == "ShapedWeight":
            continue
        part = cls(**cls.example)
        keep = (op.OutlierVeto(low=0.5, high=None), part) if name == "GroupRejection" else (part,)
        out = op.Correction(weight=part)(batch) if yaml_type in WEIGHT_TYPES else op.Correction(keep=keep)(batch)
        assert out.keep_mask.all() and torch.allclose(out.weights, torch.ones(4, 3), rtol=0, atol=1e-6), name
