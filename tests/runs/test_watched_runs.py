"""A run that is watched from outside: its endpoint, its status, and the record of its machine."""

import http.client
import json
import socket
from pathlib import Path

import pytest
from loop_cases import make_task, rl_yaml
from paused_runs import started, wait_for
from prometheus_client.parser import text_string_to_metric_families

from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.faults import Fault
from hotseat.loop.run import start
from hotseat.observe import read_lines
from hotseat.observe.report.page import read_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LIMIT_S = 600.0
FOREVER = "86400"


def status_of(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["status", str(run_dir), "--json"])
    return code, json.loads(capsys.readouterr().out)


def get(address: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=LIMIT_S)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_a_run_is_seen_while_it_waits_when_it_was_killed_and_when_it_is_finished(tmp_path, capsys):
    """The loop waits in step 2, for ever: the endpoint answers all the same."""
    task = make_task(tmp_path)
    run_dir, faults = tmp_path / "runs" / "run", [Fault("update.before", FOREVER, skip=1)]
    options = ["checkpoint.every=1", "log.endpoint.port=0"]
    with started(task, *options, planned=faults) as driver:
        assert wait_for(lambda: list((task / "faults").glob("*.happened")) or driver.poll() is not None, LIMIT_S)
        assert driver.poll() is None
        code, facts = status_of(run_dir, capsys)
        assert (code, facts["state"], facts["step"]) == (0, "running", 1)
        said, text = get(facts["endpoint"], "/healthz")
        assert said == 200
        assert (json.loads(text)["step"], json.loads(text)["doing"]) == (1, "update")
        said, text = get(facts["endpoint"], "/metrics")
        assert said == 200
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        values = {(sample.name, sample.labels.get("name")): sample.value for sample in samples}
        [last] = [line for line in read_lines(run_dir / "metrics.jsonl") if line["step"] == 1]
        served = {name: value for (family, name), value in values.items() if family == "hotseat_metric"}
        assert served == {name: value for name, value in last.items() if name != "step"}
        assert values["hotseat_step", None] == 1
        assert wait_for((run_dir / "machine.jsonl").exists, LIMIT_S)
        assert wait_for((run_dir / "checkpoints" / "step-000001").is_dir, LIMIT_S)
        driver.kill()
        driver.wait()
    code, facts = status_of(run_dir, capsys)
    assert (code, facts["state"], facts["step"]) == (6, "died", 1)

    assert main(["resume", str(run_dir)]) == 0
    code, facts = status_of(run_dir, capsys)
    assert (code, facts["state"], facts["step"], facts["endpoint"]) == (0, "finished", facts["num_steps"], None)
    assert facts["events"]["start"] == 2
    lines = read_lines(run_dir / "machine.jsonl")
    assert lines
    assert {"machine/cpu", "machine/memory"} <= lines[-1].keys()
    curves = read_run(run_dir, "run", 1_000_000)["curves"]["series"]
    assert "machine/memory" in curves


def test_a_port_that_is_taken_costs_a_run_nothing_but_its_endpoint(tmp_path):
    task = make_task(tmp_path)
    data = f"{{path: {task}/prompts.jsonl, label_key: label, max_length: 16, max_samples: 4}}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        start(loads(rl_yaml(task, log=f"{{endpoint: {{port: {port}}}}}", data=data)))
    [warning] = [event for event in read_lines(tmp_path / "runs/run/events.jsonl") if "log.endpoint" in event["text"]]
    assert warning["kind"] == "warning"
    assert f"port {port} of 127.0.0.1 (Address already in use)" in warning["text"]
    assert (tmp_path / "runs/run/model").is_dir()


@pytest.mark.ray
@pytest.mark.long
def test_a_run_says_where_the_dashboard_is_that_its_config_asks_for(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 2)
    task = make_task(tmp_path)
    data = f"{{path: {task}/prompts.jsonl, label_key: label, max_length: 16, max_samples: 4}}"
    start(loads(rl_yaml(task, cluster="{ray_dashboard: true}", data=data)))
    texts = [event["text"] for event in read_lines(tmp_path / "runs/run/events.jsonl")]
    [said] = [text for text in texts if text.startswith("Ray's dashboard: ")]
    assert said.startswith("Ray's dashboard: http://127.0.0.1:")
    assert (tmp_path / "runs/run/model").is_dir()
