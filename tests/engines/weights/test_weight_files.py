"""Weights in a folder: complete or absent, checked, inside their folder."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from trl_offpolicy.engines.engine import SyncError
from trl_offpolicy.engines.weights import files as weight_files
from trl_offpolicy.engines.weights.files import remove_all_but, safe_child, verify, write_adapter, write_weights

WEIGHTS = [(f"w{i}", torch.full((3, 4), float(i))) for i in range(5)]


def test_what_is_written_can_be_read_and_is_nothing_but_safetensors(tmp_path):
    size = write_weights(tmp_path / "v1", iter(WEIGHTS))
    files = {path.name for path in (tmp_path / "v1").iterdir()}
    assert files == {"model-00000.safetensors", "manifest.json"}
    loaded = load_file(tmp_path / "v1" / "model-00000.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in WEIGHTS)
    assert size == (tmp_path / "v1" / "model-00000.safetensors").stat().st_size
    assert (tmp_path / "v1").stat().st_mode & 0o077 == 0  # nobody else reads it


def test_large_models_are_cut_into_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 100)
    write_weights(tmp_path / "v1", iter(WEIGHTS))
    shards = sorted((tmp_path / "v1").glob("*.safetensors"))
    assert len(shards) == 3
    assert {name for shard in shards for name in load_file(shard)} == {name for name, _ in WEIGHTS}


def test_a_failure_in_the_middle_leaves_the_old_version_and_no_new_one(tmp_path):
    write_weights(tmp_path / "v1", iter(WEIGHTS))

    def broken():
        yield WEIGHTS[0]
        raise OSError(28, "No space left on device")

    with pytest.raises(SyncError, match="No space left on device"):
        write_weights(tmp_path / "v2", broken())
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]
    verify(tmp_path / "v1")


@pytest.mark.parametrize("damage", ["shorter", "changed", "absent"])
def test_damage_is_found_and_the_file_named(tmp_path, damage):
    write_weights(tmp_path / "v1", iter(WEIGHTS))
    path = tmp_path / "v1" / "model-00000.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "absent":
        path.unlink()
    elif damage == "shorter":
        path.write_bytes(content[:-1])
    else:
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(SyncError, match=r"model-00000\.safetensors"):
        verify(tmp_path / "v1")


def test_an_adapter_has_pefts_layout(tmp_path):
    write_adapter(tmp_path / "a", {"r": 4, "target_modules": ["q_proj"]}, dict(WEIGHTS))
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["r"] == 4
    assert set(load_file(tmp_path / "a" / "adapter_model.safetensors")) == {name for name, _ in WEIGHTS}


def test_only_own_versions_are_deleted(tmp_path):
    for name in ("v1", "v2", "v3"):
        write_weights(tmp_path / name, iter(WEIGHTS))
    (tmp_path / "precious").mkdir()
    (tmp_path / ".v4-123").mkdir()  # of a write that was killed
    remove_all_but(tmp_path, ["v3"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "v3"]


@pytest.mark.parametrize("name", ["../v1", "a/b", "", ".."])
def test_names_with_a_path_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="plain name"):
        safe_child(tmp_path, name)


def test_a_link_to_elsewhere_is_refused(tmp_path):
    (tmp_path / "v1").symlink_to("/tmp")
    with pytest.raises(ValueError, match="plain name"):
        safe_child(tmp_path, "v1")
