"""A locked store, a full disk and a damaged journal lose nothing that was written."""

import contextlib
import json
import os
import re
import signal

import pytest
from faultlab import Faulty, damaged, fill_disk, locked_database, next_held, small_disk
from harness import TIMEOUT_S, Cli, finished, until

from raypar.track.journal import journal_paths
from raypar.track.server import start_server
from raypar.track.store import default_tracking_uri

RATES = ["0.01", "0.02", "0.03", "0.04"]


@pytest.fixture
def disk(tmp_path):
    """A folder on a small file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(small_disk(folder))
        except OSError as error:
            pytest.skip(str(error))
        yield folder


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_locked_database_loses_nothing_and_a_damaged_journal_only_its_damaged_lines(cli, tmp_path):
    study = Faulty(tmp_path, 4)
    with study.running(cli.start("study", "faulty.py", "--no-ray")) as process:
        first, _ = next_held(study, process)
        study.go(first)
        second, _ = next_held(study, process)
        with locked_database(tmp_path):
            study.hold_no_more()
            study.go(second)
            assert process.wait(TIMEOUT_S) == 0, (tmp_path / "stderr").read_text()
            assert "records are not in the store yet; `raypar store sync` uploads them" in cli.output()
    assert (tmp_path / "stderr").read_text() == ""
    assert finished(tmp_path) == RATES  # the store and the journal together

    (journal,) = journal_paths(tmp_path)
    lines = journal.read_bytes().splitlines(keepends=True)
    waiting = [i for i, line in enumerate(lines) if json.loads(line)["kind"] == "trial"]
    bad, cut = waiting[-2], waiting[-1]
    lost = {str(json.loads(json.loads(lines[i])["result"])["spec"]["config"]["lr"]) for i in (bad, cut)}
    lines[bad] = damaged(lines[bad])
    journal.write_bytes(b"".join(lines[:cut]) + lines[cut][:100])
    synced = cli.run("store", "sync")
    output = synced.stdout + synced.stderr
    assert f"line {bad + 1}: is damaged, skipped" in output and "Traceback" not in output, output
    assert finished(tmp_path) == sorted({*RATES} - lost)
    assert "2 of 4 trials" in cli.done("store", "resume", "faulty")
    assert finished(tmp_path) == RATES
    assert set(study.starts()[4:]) == lost and len(study.starts()) == 6


@pytest.mark.mlflow
def test_a_server_that_is_down_during_a_study_has_every_result_after_sync(cli, tmp_path, tmp_path_factory):
    study = Faulty(tmp_path, 3)
    kept = tmp_path_factory.mktemp("server")
    with start_server(default_tracking_uri(kept), kept, port=22600) as server:
        uri, port = server.url, int(server.url.rpartition(":")[2])
        with study.running(cli.start("study", "faulty.py", "--no-ray", "--tracking-uri", uri)) as process:
            first, _ = next_held(study, process)
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            study.hold_no_more()
            study.go(first)
            assert process.wait(TIMEOUT_S) == 0, (tmp_path / "stderr").read_text()
    assert "3 points, 3 trials" in cli.output()
    assert "records are not in the store yet; `raypar store sync` uploads them" in cli.output()
    assert "Traceback" not in cli.output()
    refused = cli.run("store", "resume", "faulty", "--tracking-uri", uri)
    assert refused.returncode == 2 and f"The tracking store {uri} can't be used" in refused.stderr
    with start_server(default_tracking_uri(kept), kept, port=port):
        cli.done("store", "sync")
        assert finished(tmp_path, uri=uri) == RATES[:3]
        assert journal_paths(tmp_path) == ()
        cli.done("study", "faulty.py", "--no-ray", "--tracking-uri", uri)
        assert len(study.starts()) == 3
    assert not (tmp_path / "mlflow.db").exists()
    cli.wait_for_its_processes()


def test_a_full_disk_ends_a_study_which_keeps_its_results_and_can_be_resumed(disk, tmp_path):
    cli, study = Cli(disk), Faulty(disk, 4)
    for name in ("stdout", "stderr"):
        (disk / name).symlink_to(tmp_path / name)
    with study.running(cli.start("study", "faulty.py", "--no-ray")) as process:
        first, _ = next_held(study, process)
        study.go(first)
        second, _ = next_held(study, process)
        study.prepare_go(second)
        filler = fill_disk(disk)
        study.go(second)
        assert process.wait(TIMEOUT_S) == 1
    filler.unlink()
    output, errors = (tmp_path / "stdout").read_text(), (tmp_path / "stderr").read_text()
    assert re.match(r"error: The results can't be written to .*: No space left on device\n  → free some space", errors)
    assert "broke off; run `raypar store resume faulty` to continue" in output and "Traceback" not in output + errors
    # The second result may just have fitted into the journal's last block: a result is kept or lost as reported.
    kept = finished(disk)
    assert kept in ([first], sorted([first, second]))
    assert f"broke off when {len(kept)} of 4 trials were done" in output

    study.hold_no_more()
    done = cli.run("store", "resume", "faulty")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{len(kept)} of 4 trials" in done.stdout
    assert finished(disk) == ["0.01", "0.02", "0.03", "0.04"]
    assert [study.starts().count(lr) for lr in kept] == [1] * len(kept)
    until(lambda: not cli.processes(), "the end of its processes")
