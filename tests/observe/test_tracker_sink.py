"""Trackers in every state they can be in. W&B's package here is a stand-in that does what each test says."""

import importlib.util
import json
import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hotseat.config.hiding import without_secrets
from hotseat.observe.tracker_sink import MLFLOW, TRACKIO, WANDB, TrackerSink, is_wandb_requested

pytestmark = pytest.mark.slow  # each starts a process, some wait for it to be given up

STAND_IN = """
import json, os, time

def note(**what):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps(what) + "\\n")

class Settings:
    model_fields = {"silent": None, "init_timeout": None}
    def __init__(self, **given):
        note(settings=given)

class Run:
    url = "https://there/run"
    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")  # W&B's own count cannot go back
    def log(self, values):
        note(step=values["step"], values=values)
        LOG
    def finish(self):
        note(finished=True)
        FINISH

def teardown():
    note(torn_down=True)

def init(settings, **given):
    note(init=given)
    INIT
    return Run()
"""


class Case:
    """A sink on a stand-in package, what was said, and what the package saw."""

    def __init__(self, directory: Path, monkeypatch, *, init="pass", log="pass", finish="pass", text=None, **options):
        package = directory / "packages" / "wandb.py"
        package.parent.mkdir(exist_ok=True)
        stand_in = STAND_IN.replace("INIT", init).replace("LOG", log).replace("FINISH", finish)
        package.write_text(stand_in if text is None else text)
        self._notes = directory / "notes"
        monkeypatch.setenv("PYTHONPATH", str(package.parent))
        monkeypatch.setenv("NOTES", str(self._notes))
        monkeypatch.setenv("WANDB_API_KEY", "s3cret")
        self.said: list[str] = []
        where = {"name": "run", **options.pop("where", {})}
        is_resumed = options.pop("is_resumed", False)
        wandb = replace(WANDB, **{"close_s": 60.0, **options})
        self.sink = TrackerSink(
            wandb, directory, {"seed": 3}, lambda text, *_: self.said.append(text), is_resumed=is_resumed, where=where
        )

    @property
    def notes(self) -> list[dict]:
        return [json.loads(line) for line in self._notes.read_text().splitlines()] if self._notes.exists() else []

    def wait_for(self, condition) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < deadline, (self.said, self.notes)
            time.sleep(0.01)

    def close(self) -> float:
        """Seconds that it took."""
        pid = self.sink._process.pid
        began = time.monotonic()
        self.sink.close()
        assert not os.path.exists(f"/proc/{pid}")
        return time.monotonic() - began


@pytest.fixture
def case(tmp_path, monkeypatch):
    return lambda **options: Case(tmp_path, monkeypatch, **options)


def test_every_step_arrives_and_the_run_keeps_its_id(case, tmp_path):
    first = case(where={"entity": "org", "project": "p", "group": "g"})
    for step in range(3):
        first.sink.write(step, {"reward": step / 2, "bad": float("nan"), "text": "x", "none": None})
    first.close()
    seen = first.notes
    assert seen[0]["settings"] == {"silent": True, "init_timeout": 60.0}
    given = seen[1]["init"]
    assert [given[name] for name in ("entity", "project", "group", "name")] == ["org", "p", "g", "run"]
    assert given["config"] == {"seed": 3}
    assert [(note["step"], note["values"]["reward"]) for note in seen[2:5]] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert set(seen[2]["values"]) == {"reward", "bad", "step"}
    assert seen[5:] == [{"finished": True}, {"torn_down": True}]
    assert first.said == ["Weights & Biases: https://there/run"]
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"id": given["id"]}
    again = case(is_resumed=True)
    again.close()
    assert again.notes[-3]["init"]["id"] == given["id"]
    assert again.notes[-3]["init"]["resume"] == "allow"
    anew = case()
    anew.close()
    assert anew.notes[-3]["init"]["id"] != given["id"]


def test_the_key_is_in_the_environment_of_one_process_and_nowhere_else(case, tmp_path):
    found = case(init="raise ValueError('bad key ' + os.environ['WANDB_API_KEY'])")
    assert "s3cret" not in Path(f"/proc/{found.sink._process.pid}/cmdline").read_text()
    found.wait_for(lambda: found.said)
    found.close()
    assert found.said == [
        "warning: Weights & Biases failed: ValueError: bad key ***; the run is not affected, and metrics.jsonl has"
        " every number"
    ]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        ({"log": "raise ConnectionError('gone')"}, "failed: ConnectionError: gone"),
        ({"finish": "raise OSError('no more')"}, "failed: OSError: no more"),
        ({"init": "raise SystemExit(1)"}, "failed: SystemExit: 1"),
        ({"init": "os._exit(3)"}, "ended unexpectedly"),
        ({"finish": "os._exit(3)"}, "ended unexpectedly, and may lack the end of this run"),
        ({"text": "1 / 0"}, "failed: ZeroDivisionError: division by zero"),
        ({"text": "def ("}, "failed: SyntaxError"),
    ],
)
def test_what_breaks_is_said_once_and_raises_nowhere(case, broken, what):
    found = case(**broken)
    for step in range(50):
        found.sink.write(step, {"reward": 1.0})
    if "finish" not in broken:
        found.wait_for(lambda: any("warning" in line for line in found.said))
    found.sink.write(50, {"reward": 1.0})
    assert found.close() < 30
    warnings = [line for line in found.said if line.startswith("warning: Weights & Biases ")]
    assert len(warnings) == 1
    assert what in warnings[0]


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_what_hangs_for_ever_holds_up_nobody(case, where):
    """It also starts a process with a session of its own, as W&B does, which must not stay either."""
    sleep = "subprocess.Popen(['sleep', '300'], start_new_session=True)"
    found = case(**{where: f"import subprocess; note(pid={sleep}.pid); time.sleep(1000)"}, close_s=0.5)
    began = time.monotonic()
    for step in range(3):
        found.sink.write(step, {"reward": 1.0})
    assert time.monotonic() - began < 300  # not the 1,000 s of the other side
    if where == "finish":  # which nobody calls before `close`
        found.wait_for(lambda: found.said and found.notes[-1].get("step") == 2)
        wait = found.sink._process.process.wait

        def wait_once_it_hangs(timeout=None):
            if timeout:
                found.wait_for(lambda: "pid" in found.notes[-1])
            return wait(timeout)

        found.sink._process.process.wait = wait_once_it_hangs
    else:
        found.wait_for(lambda: found.notes and "pid" in found.notes[-1])
    assert found.close() < 300  # of the 1,000
    found.wait_for(lambda: state(found.notes[-1]["pid"]) == "Z")  # a kill takes a moment
    assert sum("did not finish in time" in line for line in found.said) == 1


def state(pid: int) -> str:
    """Z: it is gone, but for being collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_slow_one_loses_the_oldest_records_and_the_count_is_said_once(case, tmp_path):
    written = tmp_path / "written"
    found = case(init=f"while not os.path.exists({str(written)!r}): time.sleep(0.01)", max_waiting=10)
    values = {f"metric {number}": float(number) for number in range(200)}  # more than a pipe holds, soon
    for step in range(100):
        found.sink.write(step, values)
    written.touch()
    found.close()
    steps = [note["step"] for note in found.notes if "step" in note]
    assert steps[-10:] == list(range(90, 100))
    assert steps == sorted(steps)
    [warning] = [line for line in found.said if "warning" in line]
    assert f"was too slow: {100 - len(steps)} records were not sent" in warning


def test_when_the_run_is_killed_it_finishes(case):
    found = case()
    found.wait_for(lambda: found.said)
    found.sink._process.socket.shutdown(socket.SHUT_WR)  # as the kernel does
    assert found.sink._process.process.wait(300) == 0
    assert found.notes[-2:] == [{"finished": True}, {"torn_down": True}]


def test_when_the_run_is_killed_and_it_hangs_it_ends_itself(case):
    found = case(finish="time.sleep(1000)", close_s=0.3)
    found.wait_for(lambda: found.said)
    found.sink._process.socket.shutdown(socket.SHUT_WR)
    assert found.sink._process.process.wait(300) == 1


def test_when_it_is_wanted():
    assert not is_wandb_requested(False, {})
    assert is_wandb_requested(True, {})
    assert is_wandb_requested(False, {"WANDB_API_KEY": "k"})
    assert not is_wandb_requested(False, {"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"})
    assert not is_wandb_requested(False, {"WANDB_API_KEY": ""})


def test_a_folder_of_that_name_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)  # other packages import it where it is installed
    assert importlib.util.find_spec("wandb") is not None
    assert not WANDB.is_installed()


def test_a_config_is_sent_without_what_is_nobodys_business():
    config = {
        "cluster": {"node_groups": [{"env_configs": [{"env_vars": [{"HF_TOKEN": "s3cret"}]}]}]},
        "reward": {"url": ["http://me:s3cret@host/score", "http://host/@x", "https://host/score?key=s3cret&n=2"]},
        "seed": 3,
    }
    assert without_secrets(config) == {
        "cluster": {"node_groups": [{"env_configs": [{"env_vars": [{"HF_TOKEN": "***"}]}]}]},
        "reward": {"url": ["http://***@host/score", "http://host/@x", "https://host/score?***"]},
        "seed": 3,
    }


# --- the real packages, where they are installed ----------------------------------------------------------------------


def run_twice(tracker, directory: Path, where: dict) -> list[str]:
    """Three steps, then a resumed run that repeats the last of them and adds one; what was said."""
    said: list[str] = []
    for is_resumed, steps in ((False, range(3)), (True, range(2, 4))):
        sink = TrackerSink(
            replace(tracker, start_s=300.0, close_s=300.0),
            directory,
            {"seed": 3, "log": {"every": 1, "none": None}},
            lambda text, *_: said.append(text),
            is_resumed=is_resumed,
            where={"name": "run", **where},
        )
        for step in steps:
            sink.write(step, {"reward": step / 2, "eval/pass@4": 0.5, "eval/eval gpt_loss": 1.0, "text": "x"})
        sink.close()
    return said


@pytest.mark.skipif(not MLFLOW.is_installed(), reason="mlflow is not installed")
def test_mlflow_gets_every_step_and_a_resumed_run_goes_on_in_the_same_one(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)  # such as a server of the user's own
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run_dir = tmp_path / "runs-1"
    run_dir.mkdir()
    said = run_twice(MLFLOW, run_dir, {"uri": None, "project": "sums"})
    run_id = json.loads((run_dir / "mlflow.json").read_text())["id"]
    assert said == [f"MLflow: {uri}, experiment sums, run {run_id}"] * 2
    client = MlflowClient(tracking_uri=uri)
    assert len(client.search_runs([client.get_experiment_by_name("sums").experiment_id])) == 1
    run = client.get_run(run_id)
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params == {"seed": "3", "log.every": "1"}
    assert set(run.data.metrics) == {"reward", "eval/pass_at_4", "eval/eval gpt_loss"}
    history = sorted((each.step, each.value) for each in client.get_metric_history(run_id, "reward"))
    assert sorted(set(history)) == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]


@pytest.mark.skipif(not TRACKIO.is_installed(), reason="trackio is not installed")
def test_trackio_gets_every_step_and_a_resumed_run_goes_on_in_the_same_one(tmp_path, monkeypatch):
    import sqlite3

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "files"))
    said = run_twice(TRACKIO, tmp_path, {"project": "sums"})
    run_id = json.loads((tmp_path / "trackio.json").read_text())["id"]
    assert run_id.startswith("run-")
    assert said == [f"Trackio: project sums, run {run_id}; `trackio show --project sums` shows it"] * 2
    with sqlite3.connect(tmp_path / "files" / "sums.db") as data:
        rows = data.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in rows} == {run_id}
    values = {step: json.loads(metrics)["reward"] for _, step, metrics in rows}
    assert values == {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5}
