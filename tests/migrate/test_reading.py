"""Files as flat settings: overrides, interpolations, shell variables, parents, and what cannot be known."""

from __future__ import annotations

from pathlib import Path

import pytest

from trl_offpolicy.migrate.nested import Unresolved, apply_overrides, read_value, read_yaml, resolve
from trl_offpolicy.migrate.reading import read_settings
from trl_offpolicy.migrate.shell import read_script


def test_the_last_override_wins() -> None:
    assert apply_overrides({"a.b": 1}, ["a.b=2", "a.b=3"]) == {"a.b": 3}


def test_hydras_signs_add_and_delete() -> None:
    flat = {"a.b": 1, "a.c.d": 2, "a.c.e": 3, "ab": 4}
    assert apply_overrides(flat, ["+a.f=x", "++a.b=7", "~a.c"]) == {"a.b": 7, "ab": 4, "a.f": "x"}
    assert apply_overrides({"a.b": 1}, ["~a.b=1"]) == {}


@pytest.mark.parametrize("text", ["a.b", "=3", "a b=c", "--lr"])
def test_what_is_no_override_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"override must be a\.b=c, \+a\.b=c or ~a\.b, but got"):
        apply_overrides({}, [text])


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("True", True), ("null", None), ("'0.5_5.0'", "0.5_5.0"), ("0.5_5.0", "0.5_5.0"), ("2", 2),
     ("[0.9,0.95]", [0.9, 0.95]), ("token_k1,seq_max_k2", "token_k1,seq_max_k2"), ("a: b", "a: b")],
)  # fmt: skip
def test_values_are_read_as_hydra_reads_them(text: str, value: object) -> None:
    assert read_value(text) == value


def test_yaml_has_omegaconfs_numbers() -> None:
    assert read_yaml("{a: 1e-4, b: 1.0e-4, c: 5, d: 1_2.5}", "x") == {"a": 1e-4, "b": 1e-4, "c": 5, "d": 12.5}


def test_interpolations_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    flat = {
        "a.n": 4,
        "a.same": "${.n}",
        "a.b.above": "${..n}",
        "absolute": "${a.n}",
        "default": "${oc.select:a.missing,7}",
        "environment": "${oc.env:NOT_SET,9}",
        "product": "${mul:${a.n}, 2}",
        "text": "run-${a.n}",
    }
    assert resolve(flat) == {
        "a.n": 4, "a.same": 4, "a.b.above": 4, "absolute": 4, "default": 7, "environment": 9, "product": 8,
        "text": "run-4",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["${a.missing}", "${unknown:1}", "???", "${circle}"])
def test_what_cannot_be_filled_in_is_no_guess(text: str) -> None:
    assert isinstance(resolve({"key": text, "circle": "${circle}"})["key"], Unresolved)


def test_a_launch_script_is_read_without_running_it() -> None:
    script = read_script(
        """#!/bin/bash
set -x
MODEL=${MODEL:-"Qwen/Qwen3-4B"}   # a default
N=$((2 * 4))
NAME=run_$(date +%s)
: "${LOGGER:=console}"
ARGS=(
   --lr 1e-6   # a comment with an apostrophe: it's one
   # --seed 3
   --name "${NAME}"
)
ARGS+=(--logger $LOGGER)
cat <<EOF
--not an option
EOF
ray start --head --port 6379
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py ${ARGS[@]} --model ${MODEL} --n $N \\
   --list a b --on ${NOT_SET} "$@" | tee log
"""
    )
    assert script.entry == "python3 train.py"
    assert script.words == (
        "--lr", "1e-6", "--name", "run_$(...)", "--logger", "console", "--model", "Qwen/Qwen3-4B", "--n", "8", "--list",
        "a", "b", "--on", "${NOT_SET}",
    )  # fmt: skip
    assert isinstance(script.words[3], Unresolved) and isinstance(script.words[-1], Unresolved)


def test_only_the_places_of_this_machine_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HOME": "/home/me", "PWD": "/work", "USER": "me", "DATA": "/d"}.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "run.sh"
    path.write_text(
        "HERE=$PWD/x\npython train.py a.home=${HOME}/a.parquet a.pwd=$HERE a.user=$USER a.data=$DATA a.n=1\n"
    )
    settings = read_settings(path)
    assert settings.values == {"a.home": "/home/me/a.parquet", "a.pwd": "/work/x", "a.n": 1}
    assert settings.machine == {"a.home": "$HOME", "a.pwd": "$PWD"} and set(settings.unknown) == {"a.user", "a.data"}
    path.write_text("HOME=/other\npython train.py a.home=$HOME/a\n")
    settings = read_settings(path)
    assert settings.values == {"a.home": "/other/a"} and settings.machine == {}


def test_redirections_and_unknown_arrays_are_no_arguments(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python train.py --colocate ${MODEL_ARGS[@]} --model ${BASE}/x --lr 1 2>&1 | tee log\n")
    settings = read_settings(path)
    assert settings.values == {"colocate": True, "lr": 1}
    assert "${BASE}/x" in settings.unknown["model"]
    assert settings.notes == ("${MODEL_ARGS[@]} is not set in the script: what it holds is missing here",)


def test_hydras_folder_and_name_are_one_file(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "ours.yaml").write_text("a: {b: 1}\n")
    path = tmp_path / "run.sh"
    for name in ("ours", "'ours.yaml'"):
        path.write_text(f"python -m x.main --config-path=config --config-name={name} a.c=2\n")
        assert read_settings(path).values == {"a.b": 1, "a.c": 2}


def test_a_branch_decides_nothing_that_is_not_known() -> None:
    script = read_script(
        """
LR=1e-6
GPUS=${GPUS:-}
case "$MACHINE" in
    big) GPUS=${GPUS:-8}; TP=2; LR=1e-5 ;;
    *) GPUS=${GPUS:-4}; TP=2 ;;
esac
[ -z "$SEED" ] && SEED=3
python train.py --lr $LR --gpus $GPUS --tp $TP --seed $SEED
"""
    )
    assert script.words == ("--lr", "1e-6", "--gpus", "${GPUS}", "--tp", "2", "--seed", "3")
    assert isinstance(script.words[3], Unresolved)
    assert script.branches == ("LR",)


def test_a_setting_without_a_known_value_says_why(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python -m x.main a.lr=$LR a.b=1 'a.c=${a.b}'\n")
    settings = read_settings(path)
    assert settings.values == {"a.b": 1, "a.c": 1}
    assert "${LR}, cannot be known here" in settings.unknown["a.lr"]
    assert read_settings(path, ["a.lr=2"]).values["a.lr"] == 2


def test_defaults_of_a_file_beside_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("a: {b: 1, c: 2}\nd: 3\n")
    path = tmp_path / "own.yaml"
    path.write_text("defaults: base.yaml\na: {b: 7}\n")
    assert read_settings(path).values == {"a.c": 2, "d": 3, "a.b": 7}
    path.write_text("defaults: [elsewhere, _self_]\na: {b: 7}\n")
    settings = read_settings(path)
    assert settings.values == {"a.b": 7}
    assert "'elsewhere', which is not beside this file" in settings.notes[0]


def test_hydras_groups_are_read_at_their_place(tmp_path: Path) -> None:
    """``group@place: name``, a name that holds another choice, a group's own parents, and ``_self_`` last."""
    files = {
        "main.yaml": "defaults:\n- engine: dp\n- actor@model.actor: ${engine}_actor\n- data: plain\n- optional no: no\n"
        "- absent@here: name\n- _self_\nmodel: {actor: {clip: 0.3}}\n",
        "engine/dp.yaml": "# @package _global_\nengine_of: dp\n",
        "engine/big.yaml": "# @package _global_\nengine_of: big\n",
        "actor/dp_actor.yaml": "defaults:\n- ../optim@optim: adam\n- base\n- _self_\ngrad: 1\n",
        "actor/big_actor.yaml": "grad: 5\nclip: 0.9\n",
        "actor/base.yaml": "grad: 9\nclip: 0.2\nlevel: token\n",
        "optim/adam.yaml": "lr: 1e-6\n",
        "data/plain.yaml": "n: 2\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    settings = read_settings(tmp_path / "main.yaml")
    assert settings.values == {
        "engine_of": "dp", "model.actor.optim.lr": 1e-6, "model.actor.grad": 1, "model.actor.level": "token",
        "data.n": 2, "model.actor.clip": 0.3,
    }  # fmt: skip
    assert len(settings.notes) == 1 and "'absent@here: name', which is not beside this file" in settings.notes[0]
    chosen = read_settings(tmp_path / "main.yaml", ["engine=big"]).values
    assert chosen["model.actor.grad"] == 5 and chosen["engine_of"] == "big" and "model.actor.level" not in chosen


def test_words_without_a_dot_are_overrides_or_are_listed(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("a: {b: 1}\n")
    path = tmp_path / "run.sh"
    path.write_text(
        "python -m x.main --config grpo.yaml experiment_name=x trial_name=y a.c=2 --n 1 --k v=w stray=1 -q\n"
    )
    settings = read_settings(path)
    assert settings.values == {
        "a.b": 1, "a.c": 2, "n": 1, "k": "v=w", "experiment_name": "x", "trial_name": "y", "stray": 1
    }  # fmt: skip
    assert settings.notes == ("-q is neither --name value nor name=value: it is not read",)
    path.write_text("python -m x.main model=big a.path=score.py a.b=1\n")
    assert read_settings(path).values == {"model": "big", "a.path": "score.py", "a.b": 1}


def test_a_script_reads_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "config.yaml").write_text("a: {b: 1, c: 2}\n")
    path = tmp_path / "scripts" / "run.sh"
    path.write_text("python train.py --config config.yaml a.b=5\n")
    assert read_settings(path).values == {"a.b": 5, "a.c": 2}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("a.yaml", "- 1\n", "must hold a mapping"), ("a.yaml", "a: [", "must be YAML"), ("a.toml", "a =", "must be TOML"),
     ("a.sh", "echo hello\n", "no command in it has any")],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_settings(tmp_path / name)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="file must be an existing file, but got"):
        read_settings(tmp_path / "absent.yaml")
