"""Runs whose checkpoints go to a server that speaks S3: what was uploaded is all that a resume needs."""

import re
import shutil
from pathlib import Path

import pytest
from loop_cases import make_task, rl_yaml, same, weights
from paused_runs import started, wait_for
from s3_server import KEYS, SECRET, s3_server

from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.errors import UserError
from hotseat.faults import Fault
from hotseat.loop.run import start
from hotseat.loop.state.remote_checkpoints import RemoteCheckpoints
from hotseat.observe import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LIMIT_S = 600.0
# Four steps of two optimizer steps each, with a reference and an adaptive coefficient.
OPTIONS = ("train.num_episodes=2", "train.batch_size=8", "algorithm.kl.coef=0.1", "algorithm.kl.target=0.5")
EVERY = "checkpoint.every=1"


@pytest.fixture(scope="module")
def server():
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def task(tmp_path_factory, server) -> Path:
    """A task, with the run `plain` on it, which nothing disturbed."""
    task = make_task(tmp_path_factory.mktemp("task"))
    start(loads(rl_yaml(task, name="plain"), OPTIONS))
    return task


@pytest.mark.parametrize("how", ["resume URL", pytest.param("checkpoint.resume=true", marks=pytest.mark.long)])
def test_killed_and_its_folder_lost_a_run_ends_as_if_nothing_had_happened(server, task, tmp_path, monkeypatch, how):
    """It is extended from step 2, and killed in step 4 while the checkpoint of step 3 is being uploaded."""
    name = f"lost-{len(how)}"
    url = f"s3://bucket/{name}"
    server.trouble = lambda method, path: 500 if "step-000003/manifest" in path and method == "PUT" else None
    options = [*OPTIONS, EVERY, f"checkpoint.path={url}", "checkpoint.keep_last=1"]
    faults, remote = [Fault("update.before", "86400", skip=1)], RemoteCheckpoints(url)
    start(loads(rl_yaml(task, name=name), [*options, "train.num_episodes=1"]))
    with started(task, *options, "checkpoint.resume=true", planned=faults, name=name) as driver:
        asked = ("PUT", f"/bucket/{name}/step-000003/manifest.json")

        def is_there() -> bool:
            assert driver.poll() is None, driver.stderr.read()[-2000:]
            return asked in server.requests and any((task / "faults").glob("*.happened"))

        assert wait_for(is_there, LIMIT_S)
        assert remote.steps() == [2]
        driver.kill()
        driver.wait()
    server.trouble = lambda method, path: None
    assert 3 not in remote.steps()
    shutil.rmtree(task / "runs" / name)
    shutil.rmtree(task / "faults")

    monkeypatch.chdir(tmp_path)
    if how == "resume URL":
        assert main(["resume", url, "train.num_episodes=2"]) == 0
    else:
        start(loads(rl_yaml(task, name=""), [*options, "checkpoint.resume=true"]))
    assert same(weights(task, name), weights(task, "plain"))
    assert remote.steps()[-1] == 4
    records = read_lines(task / "runs" / name / "metrics.jsonl")
    assert [record["step"] for record in records] == [3, 4]
    events = [event["text"] for event in read_lines(task / "runs" / name / "events.jsonl")]
    assert any(text.startswith(f"downloaded {url}/step-000002: ") for text in events)
    assert f"checkpoint of step 4: {url}" in events
    written = b"".join(path.read_bytes() for path in (task / "runs" / name).rglob("*") if path.is_file())
    assert SECRET.encode() not in written
    assert KEYS["AWS_ACCESS_KEY_ID"].encode() not in written


@pytest.mark.long
def test_a_finished_run_is_extended_on_another_machine_and_a_second_run_is_refused(server, task, capsys):
    url = "s3://bucket/finished"
    options = [*OPTIONS, EVERY, f"checkpoint.path={url}"]
    start(loads(rl_yaml(task, name="finished"), options))
    assert RemoteCheckpoints(url).steps()[-1] == 4  # those that were complete during another upload may be left out
    with pytest.raises(UserError, match=f"{url} holds checkpoints of another run: set checkpoint.resume=true"):
        start(loads(rl_yaml(task, name="second"), options))
    assert not (task / "runs" / "second").exists()
    capsys.readouterr()
    assert main(["status", str(task / "runs" / "finished")]) == 0
    assert re.search(rf"checkpoints +step 4 is at {url}", capsys.readouterr().out)
    shutil.rmtree(task / "runs" / "finished")
    assert main(["resume", url, "train.num_episodes=3"]) == 0
    assert RemoteCheckpoints(url).steps()[-1] == 6
    shutil.rmtree(task / "runs" / "finished" / "checkpoints")
    assert main(["resume", str(task / "runs" / "finished")]) == 0
    start(loads(rl_yaml(task, name="longer"), [*OPTIONS, "train.num_episodes=3"]))
    assert same(weights(task, "finished"), weights(task, "longer"))


@pytest.mark.long
def test_uploads_that_never_succeed_cost_a_run_nothing_else(server, task, tmp_path, monkeypatch):
    url = "s3://bucket/never"
    monkeypatch.setattr("hotseat.loop.state.remote_copies._MAX_STALL_S", 0.5)
    server.trouble = lambda method, path: 503 if "step-" in path and method == "PUT" else None
    start(loads(rl_yaml(task, name="never"), [*OPTIONS, EVERY, f"checkpoint.path={url}"]))
    server.trouble = lambda method, path: None
    assert same(weights(task, "never"), weights(task, "plain"))
    warnings = [event["text"] for event in read_lines(task / "runs/never/events.jsonl") if event["kind"] == "warning"]
    assert warnings[0].startswith(f"an upload failed, and is tried again: {url}/step-")
    here = task / "runs" / "never" / "checkpoints" / "step-000004"
    assert warnings[-1].startswith(f"the checkpoint of step 4 is in {here}, and not in {url}: ")
    assert warnings[-1].endswith("; a resumed run uploads it")
    last = read_lines(task / "runs/never/metrics.jsonl")[-1]
    assert "upload/failures" in last
    assert "upload/step" not in last
    monkeypatch.undo()  # a busy machine may take longer than that to connect
    assert main(["resume", str(task / "runs" / "never")]) == 0
    assert RemoteCheckpoints(url).steps()[-1] == 4


@pytest.mark.long
def test_nothing_is_kept_where_nothing_is_to_be_kept(server, task):
    url = "s3://bucket/gone"
    start(loads(rl_yaml(task, name="gone"), [*OPTIONS, EVERY, f"checkpoint.path={url}", "checkpoint.keep_final=false"]))
    assert list(RemoteCheckpoints(url).store.sizes()) == ["owner.json"]
    assert list((task / "runs" / "gone" / "checkpoints").iterdir()) == []


def test_what_cannot_be_written_is_refused_before_a_model_loads(server, task, capsys):
    text = rl_yaml(task, name="refused", actor="{model: nowhere}")
    with pytest.raises(UserError, match=r"checkpoint.path: s3://no-bucket/x/.*The specified bucket does not exist"):
        start(loads(text.replace("nowhere", str(task / "model")), [EVERY, "checkpoint.path=s3://no-bucket/x"]))
    server.trouble = lambda method, path: 403 if method == "PUT" else None
    with pytest.raises(UserError, match=r"checkpoint.path: s3://bucket/x/.*(Forbidden|403|Permission)"):
        start(loads(rl_yaml(task, name="refused"), [EVERY, "checkpoint.path=s3://bucket/x"]))
    server.trouble = lambda method, path: None
    with pytest.raises(UserError, match=r"checkpoint.path: file://.* is below run_dir"):
        start(loads(rl_yaml(task, name="refused"), [EVERY, f"checkpoint.path=file://{task}/runs/x"]))
    assert main(["resume", "s3://bucket/nothing"]) != 0
    assert "s3://bucket/nothing holds no checkpoint to resume from" in capsys.readouterr().err
    assert not (task / "runs" / "refused").exists()
