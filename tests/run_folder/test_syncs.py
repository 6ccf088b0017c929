"""The syncs of a run: what is written is read, and syncs that brought nothing new are found."""

import json

from trl_offpolicy.engines.engine import SyncReport
from trl_offpolicy.run_folder.syncs import append_sync, read_syncs, repeated_syncs
from trl_offpolicy.run_folder.writer import prepare_run_folder


def sync(version, checksum, **more):
    return SyncReport(version=version, kind="memory", bytes=8, seconds=0.5, checksum=checksum, **more)


def test_what_was_written_is_read(tmp_path):
    syncs = (sync(0, "a"), sync(1, "b", agreement=0.99, changed=1.0, visible=0.1, engine_dtype="bfloat16"))
    for one in syncs:
        append_sync(tmp_path, one)
    with (tmp_path / "syncs.jsonl").open("a") as file:
        file.write('{"step": 2, "version"')  # a kill
    assert read_syncs(tmp_path) == syncs
    rows = [json.loads(line) for line in (tmp_path / "syncs.jsonl").read_text().splitlines()[:2]]
    assert [row["step"] for row in rows] == [0, 1] and rows[0]["time"] > 1.6e9


def test_columns_of_a_later_version_are_ignored_and_a_run_without_the_file_has_none(tmp_path):
    assert read_syncs(tmp_path) == ()
    row = {"version": 1, "kind": "memory", "bytes": 0, "seconds": 0.0, "later": 1}
    (tmp_path / "syncs.jsonl").write_text(json.dumps(row) + "\n[]\n")
    assert [one.version for one in read_syncs(tmp_path)] == [1]


def test_a_sync_that_brought_nothing_new_is_found():
    syncs = [sync(0, "a"), sync(0, "a"), sync(1, "b"), sync(2, "b", changed=1.0), sync(3, None), sync(4, None)]
    assert [(a.version, b.version) for a, b in repeated_syncs(syncs)] == [(1, 2)]


def test_a_resumed_run_sends_the_weights_of_its_checkpoint_again(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    for version in range(4):
        append_sync(tmp_path, sync(version, str(version)))
    prepare_run_folder(tmp_path, resumed_step=2)
    assert [one.version for one in read_syncs(tmp_path)] == [0, 1]
    prepare_run_folder(tmp_path, resumed_step=0)
    assert read_syncs(tmp_path) == ()
