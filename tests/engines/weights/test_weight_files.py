"""Weights in a folder: complete or absent, checked, inside their folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trl_offpolicy.engines.engine import EngineError, SyncError
from trl_offpolicy.engines.settings import EngineSettings
from trl_offpolicy.engines.weights import files as weight_files
from trl_offpolicy.engines.weights.files import (
    WeightVersions,
    require_same,
    require_writable,
    safe_child,
    weights_folder,
    write_adapter,
    write_weights,
)

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
    require_same(tmp_path / "v1" / "model-00000.safetensors", dict(WEIGHTS))


@pytest.mark.parametrize("damage", ["shorter", "changed", "absent", "other names", "other dtype", "other shape"])
def test_damage_is_found_and_the_file_named(tmp_path, damage):
    write_weights(tmp_path / "v1", iter(WEIGHTS))
    path = tmp_path / "v1" / "model-00000.safetensors"
    content = bytearray(path.read_bytes())
    wanted = dict(WEIGHTS)
    if damage == "absent":
        path.unlink()
    elif damage == "other names":
        wanted["w5"] = wanted.pop("w4")
    elif damage == "other dtype":
        wanted["w4"] = wanted["w4"].view(torch.int32)  # the same bytes
    elif damage == "other shape":
        wanted["w4"] = wanted["w4"].T.contiguous()  # the same number everywhere
    elif damage == "shorter":
        path.write_bytes(content[:-1])
    else:
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(SyncError, match=r"model-00000\.safetensors"):
        require_same(path, wanted)


def test_what_is_written_is_read_back(tmp_path, monkeypatch):
    """A disk that returns something else: NaN is equal to itself here, and types without arithmetic are compared."""
    odd = [
        ("nan", torch.full((2,), torch.nan)),
        ("float8", torch.ones(3).to(torch.float8_e4m3fn)),
        ("one", torch.ones(())),
    ]
    write_weights(tmp_path / "v1", iter(odd))

    def damaged(tensors, path):
        save_file({name: -value for name, value in tensors.items()}, path)

    monkeypatch.setattr(weight_files, "save_file", damaged)
    with pytest.raises(SyncError, match=r"model-00000\.safetensors does not hold what was written"):
        write_weights(tmp_path / "v2", iter(WEIGHTS))
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


class Elsewhere(torch.Tensor):
    """A tensor that counts how often it is brought to the host, as one of a GPU must be."""

    brought = 0

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        Elsewhere.brought += 1
        return torch.Tensor(self)


@pytest.mark.parametrize("adapter", [True, False])
def test_what_lies_on_a_device_is_compared_on_the_host(tmp_path, adapter):
    there = [(name, value.as_subclass(Elsewhere)) for name, value in WEIGHTS]
    before = Elsewhere.brought
    if adapter:
        write_adapter(tmp_path / "v1", {"r": 4}, dict(there))
    else:
        write_weights(tmp_path / "v1", iter(there))
    assert Elsewhere.brought == before + len(there)


def test_all_that_is_written_is_waited_for(tmp_path, monkeypatch):
    """A loss of power leaves no file of a complete version empty."""
    waited = []
    monkeypatch.setattr(weight_files, "fsync", lambda path: waited.append(path.name))
    write_adapter(tmp_path / "a", {"r": 4}, dict(WEIGHTS))
    assert {path.name for path in (tmp_path / "a").iterdir()} <= set(waited)


def test_what_is_no_fault_of_the_disk_is_not_called_one(tmp_path, monkeypatch):
    def broken():
        yield WEIGHTS[0]
        raise RuntimeError("Expected all tensors to be on the same device")

    with pytest.raises(RuntimeError, match="same device"):
        write_weights(tmp_path / "v1", broken())
    assert not list(tmp_path.iterdir())


def test_an_adapter_has_pefts_layout(tmp_path):
    write_adapter(tmp_path / "a", {"r": 4, "target_modules": ["q_proj"]}, dict(WEIGHTS))
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["r"] == 4
    assert set(load_file(tmp_path / "a" / "adapter_model.safetensors")) == {name for name, _ in WEIGHTS}


def version(folder, name):
    write_weights(folder / name, iter(WEIGHTS[:1]))


def test_only_the_named_versions_of_this_run_and_nothing_of_dead_ones_are_kept(tmp_path):
    mine, theirs = WeightVersions(tmp_path, "mine"), WeightVersions(tmp_path, "theirs")
    mine.claim()
    theirs.claim()
    for name in ("mine-1", "mine-2", "mine-3", "theirs-1", "killed-7"):
        version(tmp_path, name)
    for name in ("precious", ".mine-4-123", ".killed-8-99"):  # the last two of writes that were killed
        (tmp_path / name).mkdir()
    (tmp_path / "killed.alive").touch()  # a process that is killed leaves the file, but not the lock on it
    mine.keep(["mine-3"])
    kept = {"precious", "mine-3", "theirs-1", "mine.alive", "theirs.alive"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    theirs.close()
    assert {path.name for path in tmp_path.iterdir()} == kept - {"theirs-1", "theirs.alive"}


def test_nothing_is_left_at_the_end_and_the_run_can_go_on(tmp_path):
    folder = tmp_path / "weights"
    run = WeightVersions(folder, "mine")
    run.close()  # nothing was written
    assert not run.removed
    for number in range(2):
        run.claim()
        assert not run.removed
        version(folder, f"mine-{number}")
        run.close()
        assert run.removed and not folder.exists()


def test_two_processes_cannot_be_the_same_run(tmp_path):
    one, other = WeightVersions(tmp_path, "mine"), WeightVersions(tmp_path, "mine")
    one.claim()
    one.claim()
    with pytest.raises(EngineError, match="run must be the name of one run alone"):
        other.claim()


def test_what_a_process_wrote_goes_with_it(tmp_path):
    run = WeightVersions(tmp_path / "weights", "mine")
    run.claim()
    version(run.folder, "mine-0")
    folder = run.folder
    del run  # as at the end of the process, also after an exception
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    require_writable(tmp_path / "a" / "b", where="engine.folder")
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "b", Path("/proc/none")):
        with pytest.raises(ValueError, match=r"engine\.folder must be a folder that can be written to, but got /"):
            require_writable(path, where="engine.folder")


def test_memory_is_a_folder_of_this_user_in_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "SHARED_MEMORY", tmp_path)
    own = weights_folder("memory")
    assert own == weights_folder(Path("memory")) == tmp_path / f"trl-offpolicy-{os.getuid()}"
    assert EngineSettings.parse({"folder": "memory"}).folder == own
    assert EngineSettings.parse({"folder": "./memory/x"}).folder == Path("memory/x").resolve()
    run = WeightVersions(own, "mine")
    run.claim()
    assert own.stat().st_mode & 0o077 == 0  # nobody else reads the weights
    run.close()
    assert not own.exists()


def test_a_name_in_shared_memory_that_somebody_else_took_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "SHARED_MEMORY", tmp_path)
    own = weights_folder("memory")
    own.symlink_to("/tmp")
    with pytest.raises(ValueError, match=r"^engine\.folder must be a path, but got 'memory', and .* of this user"):
        weights_folder("memory")
    own.unlink()
    own.mkdir()
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    (tmp_path / f"trl-offpolicy-{os.getuid()}").mkdir()
    with pytest.raises(ValueError, match="of this user"):
        weights_folder("memory")
    monkeypatch.setattr(weight_files, "SHARED_MEMORY", tmp_path / "none")
    with pytest.raises(ValueError, match=r"this machine has no .*none"):
        weights_folder("memory")


@pytest.mark.parametrize("name", ["../v1", "a/b", "", ".."])
def test_names_with_a_path_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="plain name"):
        safe_child(tmp_path, name)


def test_a_link_to_elsewhere_is_refused(tmp_path):
    (tmp_path / "v1").symlink_to("/tmp")
    with pytest.raises(ValueError, match="plain name"):
        safe_child(tmp_path, "v1")
