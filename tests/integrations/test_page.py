"""docs/integrations.md as this kit reads it: every block and every mapping of the page is a method for its hook.

No framework is needed. ``test_verl*.py`` compose the same lines with verl, ``scripts/fresh_integrations.py`` starts the
others.
"""

import re
import shlex
import tomllib
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml
from verl_process import HERE, OURS, POLICY_LOSS

import trl_offpolicy as op
from trl_offpolicy import presets
from trl_offpolicy.integrations import slime
from trl_offpolicy.integrations._common import read_method

PAGE = (HERE.parents[1] / "docs" / "integrations.md").read_text()
FRAMEWORKS = {"verl": "verl", "SkyRL": "skyrl", "slime and miles": "slime", "prime-rl": "prime_rl"}
ORDER = ["**Install", "**Take out of your", "**Carried:**", "**Not carried:**", "**Doctor:**", "**What was run**"]


def section(title):
    """What stands below a heading of the second level."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(title):
    return re.findall(r"^```text\n(.*?)^```", section(title), flags=re.MULTILINE | re.DOTALL)


def inline(title):
    """The line that brings the framework's own correction along."""
    return re.search(r"bring (?:it|them) along[^`]*`([^`]*)`", section(title))[1]


def value_of(arguments, key):
    """What follows ``key=`` among words of a command line, as YAML."""
    (found,) = [word.split("=", 1)[1] for word in arguments if word.split("=", 1)[0] == key]
    return yaml.safe_load(found)


def mappings(title):
    """The mapping in the block of the section, and the one that brings the framework's own correction along."""
    if title == "prime-rl":
        return tomllib.loads(blocks(title)[0])["trainer"]["loss"]["kwargs"], tomllib.loads(inline(title))["kwargs"]
    if title == "slime and miles":
        return yaml.safe_load(blocks(title)[1])["offpolicy"], yaml.safe_load(inline(title))["offpolicy"]
    key = f"+{POLICY_LOSS}.offpolicy" if title == "verl" else "offpolicy"
    return value_of(shlex.split(blocks(title)[0]), key), value_of(shlex.split(inline(title)), "offpolicy")


@pytest.mark.parametrize("title", FRAMEWORKS)
def test_the_order_of_a_section(title):
    places = [section(title).index(part) for part in ORDER]
    assert places == sorted(places)
    assert places[0] < section(title).index("```text") < places[1]


@pytest.mark.parametrize("title", FRAMEWORKS)
def test_the_mapping_in_the_block_is_the_preset(title):
    given, _ = mappings(title)
    method = read_method(given, where="offpolicy", framework=title)
    assert method.correction == presets.get("paper/tis").correction
    assert method.run_dir == Path(f"runs/{FRAMEWORKS[title]}")
    assert f"`trl-offpolicy doctor {method.run_dir}`" in section(title)


BROUGHT = {
    "verl": op.TruncateWeight(max_weight=2.0),
    "SkyRL": op.TruncateWeight(max_weight=2.0),
    "slime and miles": op.TruncateWeight(max_weight=2.0),
}


@pytest.mark.parametrize("title", FRAMEWORKS)
def test_the_mapping_that_brings_the_own_correction_along(title):
    given, brought = mappings(title)
    method = read_method(brought, where="offpolicy", framework=title)
    assert brought["run_dir"] == given["run_dir"]
    if title in BROUGHT:
        assert (method.correction.weight, method.correction.keep) == (BROUGHT[title], ())
    else:
        (mask,) = method.correction.keep
        assert method.objective.drift_coef == 1e-3 and isinstance(mask, op.ProbabilityDifferenceMask)


def test_verls_lines_are_those_of_its_whole_training():
    """``test_verl_training.py`` and ``test_verl_engine.py`` give verl the lines of OURS."""
    words = shlex.split(blocks("verl")[0].replace("\\\n", " "))
    assert words[:3] == ["python3", "-m", "verl.trainer.main_ppo"]
    assert words[5:7] == list(OURS)
    assert words[8:] == ["actor_rollout_ref.rollout.calculate_log_probs=True"]
    training = (HERE / "test_verl_training.py").read_text()
    assert f'"{words[8]}"' in training and 'f"+{POLICY_LOSS}.offpolicy={{preset: paper/tis' in training


def test_skyrls_arguments_name_this_kits_entry_point():
    words = shlex.split(blocks("SkyRL")[0].replace("\\\n", " "))
    assert callable(import_module(value_of(words, "trainer.override_entrypoint")).main)
    assert value_of(words, "trainer.algorithm.policy_loss_type") == "offpolicy"
    started = (HERE / "as_user.py").read_text()  # with which scripts/fresh_integrations.py starts SkyRL
    for word in words[3:-1]:
        assert f'"{word}"' in started or word.startswith("offpolicy="), word


def test_slimes_arguments_weight_a_loss():
    """Its function on a response whose second token was drawn four times too rarely: min(4, 2) = 2."""
    words = shlex.split(blocks("slime and miles")[0])
    module, _, name = words[words.index("--custom-tis-function-path") + 1].rpartition(".")
    function = getattr(import_module(module), name)
    assert function is slime.correct and "--use-tis" in words
    assert words[words.index("--custom-config-path") + 1] == "offpolicy.yaml"
    given, _ = mappings("slime and miles")
    args = Namespace(use_tis=True, offpolicy={name: value for name, value in given.items() if name != "run_dir"})
    old, sampling = torch.tensor([0.5, 0.4]).log(), torch.tensor([0.5, 0.1]).log()
    loss, masks, _ = function(
        args, pg_loss=torch.ones(2), train_log_probs=[old], rollout_log_probs=[sampling], loss_masks=[torch.ones(2)]
    )
    assert loss.tolist() == pytest.approx([1.0, 2.0]) and masks[0].tolist() == [1, 1]


def test_prime_rls_file_names_this_kits_loss():
    table = tomllib.loads(blocks("prime-rl")[0])["trainer"]["loss"]
    module, _, name = table["import_path"].rpartition(".")
    assert table["type"] == "custom" and callable(getattr(import_module(module), name))
