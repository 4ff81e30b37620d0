"""The status of a run by its files: what its last sign of life says, and whether a process holds its directory."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from hotseat.cli.main import main
from hotseat.loop.state.run_dir import sole_owner
from hotseat.observe import Monitor, RunProgress, read_lines
from hotseat.observe.metric_files import read_last_line
from hotseat.observe.monitor import HEARTBEAT
from hotseat.observe.status import SILENT_S, read_status

ELSEWHERE = "another-machine.example"
HOLDER = """
import sys
from pathlib import Path
from hotseat.loop.state.run_dir import sole_owner
with sole_owner(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def make_run(run_dir: Path, **beat: object) -> Path:
    now_s = time.time()
    usual = {"state": "running", "time": now_s, "host": socket.gethostname(), "pid": 1, "started": now_s - 60}
    place = {"step": 3, "num_steps": 9, "doing": "rollout", "since": now_s - 5, "progress": now_s - 5, "limit_s": 30.0}
    ended = {"error": None, "endpoint": None, "machine": {}}
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("task: rl\n")
    (run_dir / HEARTBEAT).write_text(json.dumps(usual | place | ended | beat))
    return run_dir


@pytest.mark.parametrize(
    ("beat", "is_owned", "state"),
    [
        ({}, True, "running"),
        ({}, False, "died"),
        ({"host": ELSEWHERE}, False, "running"),  # locks of network disks may not be seen from here
        ({"host": ELSEWHERE, "ago": SILENT_S + 60}, False, "died"),
        ({"host": ELSEWHERE, "ago": SILENT_S + 60}, True, "stuck"),
        ({"ago": SILENT_S + 60}, True, "stuck"),  # stopped as a whole
        ({"quiet": 29.0}, True, "running"),
        ({"quiet": 61.0}, True, "stuck"),
        ({"quiet": 61.0, "limit_s": 600.0}, True, "running"),
        ({"state": "finished"}, False, "finished"),
        ({"state": "failed", "ago": 1e6}, False, "failed"),
        ({"state": "stopped"}, False, "stopped"),
        ({"state": "finished"}, True, "starting"),  # a resumed run holds the directory, and has not spoken yet
    ],
)
def test_state(tmp_path, beat, is_owned, state):
    beat = dict(beat)
    said_s = time.time() - beat.pop("ago", 0.0)
    progress_s = said_s - beat.pop("quiet", 0.0)
    run_dir = make_run(tmp_path / "run", **{"time": said_s, "progress": progress_s} | beat)
    assert read_status(run_dir, is_owned).state == state


def test_a_run_that_has_said_nothing_is_starting_or_unknown(tmp_path):
    for damaged in (None, "", "{", "[]", "{}"):
        if damaged is not None:
            (tmp_path / HEARTBEAT).write_text(damaged)
        assert read_status(tmp_path, True).state == "starting"
        assert read_status(tmp_path, False).state == "unknown"


CODES = {"running": 0, "finished": 0, "stopped": 4, "failed": 5}


@pytest.mark.parametrize("state", CODES)
def test_exit_codes_and_output_of_the_command(tmp_path, capsys, state):
    run_dir = make_run(
        tmp_path / "run", host=ELSEWHERE, state=state, error="RunError: gone" if state == "failed" else None
    )
    events = [{"kind": "start", "text": "started"}, {"kind": "fault", "text": "engine 0 died\nits stack"}]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"kind": "no')
    (run_dir / "metrics.jsonl").write_text('{"step": 4, "reward": 0.5}\n{"step": 5, "rew')
    assert main(["status", str(run_dir)]) == CODES[state]
    shown = capsys.readouterr().out
    assert f"{state}: " in shown
    assert "4 of 9" in shown
    assert "reward 0.5" in shown
    assert "1 start, 1 fault" in shown
    assert "engine 0 died" in shown
    assert ("RunError: gone" in shown) == (state == "failed")
    assert main(["status", str(run_dir), "--json"]) == CODES[state]
    facts = json.loads(capsys.readouterr().out)
    assert (facts["state"], facts["step"], facts["num_steps"]) == (state, 4, 9)
    assert facts["metrics"] == {"step": 4, "reward": 0.5}
    assert facts["events"] == {"start": 1, "fault": 1}
    assert facts["host"] == ELSEWHERE


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main(["status", str(tmp_path / "nothing")]) == 2
    assert main(["status", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_process_leaves_a_run_that_has_died(tmp_path):
    run_dir = make_run(tmp_path / "run")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        assert main(["status", str(run_dir)]) == 0
        holder.kill()
        holder.wait()
        assert main(["status", str(run_dir)]) == 6


@pytest.mark.parametrize(
    ("error", "state", "said"),
    [
        (None, "finished", None),
        (KeyboardInterrupt(), "stopped", None),
        (ValueError("no http://me:secret@host/ here"), "failed", "ValueError: no http://***@host/ here"),
    ],
)
def test_the_last_sign_of_life_says_how_a_run_ended(tmp_path, error, state, said):
    (tmp_path / "config.yaml").write_text("task: rl\n")
    progress = RunProgress(7)
    progress.end_step(2, {})
    monitor = Monitor(tmp_path, progress, every_s=3600.0)
    monitor.serves_at("http://127.0.0.1:1")
    with sole_owner(tmp_path):
        status = read_status(tmp_path, is_owned=True)
        assert (status.state, status.step, status.heartbeat["pid"]) == ("running", 2, os.getpid())
        assert status.heartbeat["endpoint"] == "http://127.0.0.1:1"
    with nullcontext() if error is None else pytest.raises(type(error)), monitor.until_the_end():
        if error is not None:
            raise error
    status = read_status(tmp_path, is_owned=False)
    assert (status.state, status.heartbeat["error"], status.heartbeat["endpoint"]) == (state, said, None)


@pytest.mark.slow
def test_a_monitor_measures_and_its_disk_may_vanish(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    monitor = Monitor(run_dir, RunProgress(7), every_s=0.01)
    with monitor.until_the_end():
        while not (run_dir / "machine.jsonl").exists() or len(read_lines(run_dir / "machine.jsonl")) < 3:
            time.sleep(0.01)
        assert {"machine/cpu", "machine/memory"} <= monitor.metrics().keys()
        for file in run_dir.iterdir():
            file.unlink(missing_ok=True)
        run_dir.rename(tmp_path / "elsewhere")
        before = monitor.newest
        while monitor.newest is before:
            time.sleep(0.01)
    assert not run_dir.exists()


def test_the_last_line_is_found_however_long_it_is(tmp_path):
    path = tmp_path / "lines"
    assert read_last_line(path) is None
    long = {"step": 2, "text": "x" * 200_000}
    path.write_text("")
    assert read_last_line(path) is None
    path.write_text('{"step": 1}\n' + json.dumps(long) + "\n")
    assert read_last_line(path) == long
    path.write_text('{"step": 1}\n' + json.dumps(long) + '\n{"step": 3, ' + "y" * 70_000)
    assert read_last_line(path) == long
    path.write_text("nonsense\n")
    assert read_last_line(path) is None
