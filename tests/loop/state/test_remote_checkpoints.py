"""Checkpoints at a URL: complete or absent whatever fails, on a file system and on a server that speaks S3."""

import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from environments import own_environment
from paused_runs import held, wait_for
from s3_server import s3_server

from hotseat.config import loads
from hotseat.errors import CheckpointError, StoreError, TakenOverError
from hotseat.faults import VARIABLE, Fault
from hotseat.loop.state.checkpoints import CheckpointStore
from hotseat.loop.state.remote_checkpoints import RemoteCheckpoints, newest_state
from hotseat.loop.state.saving import Saver
from hotseat.loop.state.uploads import Uploader
from hotseat.processes.kept_driver import Restart

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_S = 300.0


@pytest.fixture(scope="module")
def server():
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(server, request):
    """A URL of the test's own on a server without trouble."""
    server.trouble = lambda method, path: None
    yield f"s3://bucket/{request.node.name.replace('[', '-').rstrip(']')}"
    server.trouble = lambda method, path: None


@pytest.fixture(params=["s3", "file"])
def url(request, tmp_path):
    return request.getfixturevalue("s3") if request.param == "s3" else f"file://{tmp_path}/elsewhere"


@pytest.fixture
def local(tmp_path):
    return CheckpointStore(tmp_path / "here")


def write(store, step, best=None, text="weights"):
    path = store.begin(step, 0)
    (path / "actor").mkdir()
    (path / "actor" / "shard-0").write_text(f"{text} of {step}")
    (path / "ledger.jsonl").write_text("")
    return store.commit(step, {"step": step, "best_metric": best, "run": "/somewhere/runs/run-1"})


def remote_at(url, **options):
    remote = RemoteCheckpoints(url, run="run-1", **options)
    remote.take_over()
    return remote


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def downloaded(url, tmp_path, step=None) -> Path:
    """Download the newest, or another one, as a machine does that has nothing."""
    shutil.rmtree(tmp_path / "there", ignore_errors=True)
    remote, into = RemoteCheckpoints(url), CheckpointStore(tmp_path / "there")
    path = remote.download(remote.steps()[-1] if step is None else step, into, lambda *_: None)
    assert into.newest().path == path
    return path


def test_what_is_downloaded_is_what_was_uploaded(url, local, tmp_path):
    remote = remote_at(url)
    path = write(local, 1)
    moved = []
    assert remote.upload(1, path, moved.append)
    assert sum(moved) == local.size(1) - (path / "manifest.json").stat().st_size
    assert not remote.upload(1, path)
    assert contents(downloaded(url, tmp_path)) == contents(path)
    assert newest_state(url)["run"] == "/somewhere/runs/run-1"


def test_without_a_manifest_it_does_not_exist_and_is_removed(url, local):
    remote = remote_at(url)
    remote.upload(2, write(local, 2))
    remote.store.write("step-000003/actor/shard-0", b"half")
    assert RemoteCheckpoints(url).steps() == [2]
    remote.prune()
    assert [name for name in remote.store.sizes() if "step-000003" in name] == []
    assert newest_state("/".join([url, "nothing"])) is None


def test_the_last_ones_and_the_best_are_kept(url, local):
    remote = remote_at(url, keep_last=2)
    for step, metric in ((1, 0.1), (2, 0.9), (3, 0.3), (4, 0.4), (5, None)):
        remote.upload(step, write(local, step, metric))
        remote.prune()
    assert remote.steps() == [2, 4, 5]
    after = remote_at(url, keep_last=1)  # another process, which has to read what the best is
    after.prune()
    assert after.steps() == [2, 5]
    after.delete_all(but_with="model")
    assert after.steps() == []
    assert list(after.store.sizes()) == ["owner.json"]


def test_another_process_that_takes_over_ends_the_uploads_of_the_first(url, local):
    first = remote_at(url)
    first.upload(1, write(local, 1))
    remote_at(url)
    with pytest.raises(TakenOverError, match=f"of the run run-1, writes to {url} now"):
        first.upload(2, write(local, 2))
    with pytest.raises(TakenOverError):
        first.prune()
    assert first.steps() == [1]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("actor/shard-0", b"weights of 3", "actor/shard-0 is damaged: it has other contents than were uploaded"),
        ("actor/shard-0", b"short", "actor/shard-0 is damaged: it has 5 bytes, 12 were uploaded"),
        ("actor/shard-0", None, "actor/shard-0 is damaged: it is not there; remove"),
        ("state.json", b"{}", "state.json is damaged"),
        ("manifest.json", b"{", "manifest.json is damaged"),
        ("manifest.json", b'{"format": 2, "step": 2, "files": {"../x": {"bytes": 1, "hash": "a"}}}', "is damaged"),
    ],
)
def test_damage_is_named_and_never_skipped(url, local, tmp_path, monkeypatch, file, content, message):
    monkeypatch.setattr("hotseat.loop.state.remote_checkpoints._PAUSE_S", 0.0)
    remote = remote_at(url)
    remote.upload(1, write(local, 1))
    remote.upload(2, write(local, 2))
    if content is None:
        remote.store.delete([f"step-000002/{file}"])
    else:
        remote.store.write(f"step-000002/{file}", content)
    with pytest.raises(CheckpointError) as caught:
        downloaded(url, tmp_path)
    assert f"{url}/step-000002/" in str(caught.value)
    assert message in str(caught.value)
    assert list((tmp_path / "there").glob("*")) == []
    downloaded(url, tmp_path, step=1)


def test_a_manifest_cannot_name_a_file_elsewhere(url, local, tmp_path):
    remote = remote_at(url)
    path = write(local, 1)
    remote.upload(1, path)
    for name in ("../outside", "/etc/outside", "actor/../../outside", "actor//shard", "manifest.json", ""):
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"][name] = manifest["files"]["actor/shard-0"]
        remote.store.write("step-000001/manifest.json", json.dumps(manifest).encode())
        with pytest.raises(CheckpointError, match="is damaged: it names a file"):
            downloaded(url, tmp_path)


# --- deaths -----------------------------------------------------------------------------------------------------------

UPLOADS = """
import sys
from pathlib import Path
from hotseat.loop.state.checkpoints import CheckpointStore
from hotseat.loop.state.remote_checkpoints import RemoteCheckpoints

url, folder = sys.argv[1:]
remote, local = RemoteCheckpoints(url, keep_last=1), CheckpointStore(Path(folder))
remote.take_over()
print("ready", flush=True)
sys.stdin.readline()
remote.upload(2, local.path(2))
remote.prune()
"""


def uploading(url, local, **environment):
    command = [sys.executable, "-c", UPLOADS, url, str(local.directory)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**own_environment(), **environment}, **pipes)


def one_is_whole(url, local, tmp_path):
    path = downloaded(url, tmp_path)
    assert contents(path) == contents(local.path(int(path.name[-6:])))
    remote = remote_at(url, keep_last=1)  # the next process, which uploads what is not there
    remote.upload(2, local.path(2))
    remote.prune()
    assert remote.steps() == [2]
    assert contents(downloaded(url, tmp_path)) == contents(local.path(2))
    assert {name.partition("/")[0] for name in remote.store.sizes()} == {"owner.json", "step-000002"}


@pytest.mark.parametrize(
    ("point", "skip"),
    [("upload.file", 0), ("upload.file", 2), ("upload.manifest", 0), ("upload.after", 0), ("upload.delete", 0)],
)
def test_killed_between_two_files_one_is_whole(local, tmp_path, point, skip):
    url = f"file://{tmp_path}/elsewhere"
    remote_at(url).upload(1, write(local, 1))
    write(local, 2)
    (tmp_path / "faults").mkdir()
    Fault(point, "kill", skip=skip).arm(tmp_path / "faults", "one")
    with uploading(url, local, **{VARIABLE: str(tmp_path / "faults")}) as process:
        process.communicate("go\n", timeout=LIMIT_S)
        assert process.returncode == -9
    one_is_whole(url, local, tmp_path)


# Requests of an upload of 3 files and a manifest to S3, of which the server gets the last one before or after.
@pytest.mark.parametrize(
    ("method", "number"),
    [
        ("PUT", 4),
        ("DELETE", 1),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("PUT", 1), ("PUT", 3), ("DELETE", 2))),
    ],
)
def test_killed_within_a_request_one_is_whole(server, s3, local, tmp_path, method, number):
    remote_at(s3).upload(1, write(local, 1))
    write(local, 2)
    with uploading(s3, local) as process:
        assert process.stdout.readline() == "ready\n"
        server.kill_at(number, lambda: process.pid, method)
        process.communicate("go\n", timeout=LIMIT_S)
        assert process.returncode == -9
    server.trouble = lambda method, path: None
    one_is_whole(s3, local, tmp_path)


# --- a server in trouble ----------------------------------------------------------------------------------------------


class Said:
    def __init__(self):
        self.lines: list[tuple[str, str]] = []

    def __call__(self, text, kind="note"):
        self.lines.append((kind, text))


def uploader_of(url, local, **options):
    return Uploader(remote_at(url, **options), local, first_pause_s=0.05, longest_pause_s=0.1)


def test_what_fails_is_tried_again_and_said_once(server, s3, local):
    write(local, 1)
    uploads, said = uploader_of(s3, local), Said()
    server.trouble = lambda method, path: 500 if method == "PUT" else None
    uploads.start(said)
    assert wait_for(lambda: uploads.num_failures >= 3, LIMIT_S)
    assert uploads.facts()["last_step"] is None
    assert "500" in uploads.facts()["error"] or "Internal" in uploads.facts()["error"], uploads.facts()
    assert uploads.metrics()["upload/failures"] >= 3
    assert not uploads.finish(0.0, said)
    server.trouble = lambda method, path: None
    assert uploads.finish(LIMIT_S, lambda text: None)
    assert uploads.facts()["last_step"] == 1
    assert uploads.facts()["error"] is None
    warnings = [text for kind, text in said.lines if kind == "warning"]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"an upload failed, and is tried again: {s3}/step-000001/")
    assert [text for _, text in said.lines if text.startswith("uploads work again")]
    uploads.close()


def test_a_slow_server_holds_nothing_up_and_the_newest_goes_next(server, s3, local):
    """While step 1 is under way, steps 2 to 6 are completed: the first stays on disk, and of the others one goes."""
    local.keep_last = 2
    release = threading.Event()
    server.trouble = lambda method, path: release.wait(LIMIT_S) and None if "shard" in path else None
    write(local, 1)
    uploads, said = uploader_of(s3, local), Said()
    uploads.start(said)
    assert wait_for(lambda: uploads.step == 1, LIMIT_S)
    for step in range(2, 7):
        write(local, step)
        uploads.wake()
    assert local.steps() == [1, 5, 6]
    shown = []
    assert not uploads.finish(0.0, shown.append)
    assert uploads.describe().startswith("the checkpoint of step 1 (")
    release.set()
    assert uploads.finish(LIMIT_S, shown.append)
    assert RemoteCheckpoints(s3).steps() == [1, 6]
    write(local, 7)
    assert local.steps() == [6, 7]
    uploads.close()
    assert said.lines == []


@pytest.mark.long
def test_an_answer_that_is_cut_is_asked_for_again(server, s3, local, tmp_path, monkeypatch):
    monkeypatch.setattr("hotseat.loop.state.remote_checkpoints._PAUSE_S", 0.0)
    remote_at(s3).upload(1, write(local, 1, text="x" * 100_000))
    answers = iter([0.5, 0.0])
    server.trouble = lambda method, path: next(answers, None) if method == "GET" and "shard" in path else None
    assert contents(downloaded(s3, tmp_path)) == contents(local.path(1))
    assert next(answers, None) is None
    server.trouble = lambda method, path: 0.5 if method == "GET" and "shard" in path else None
    with pytest.raises((CheckpointError, StoreError), match=f"{s3}/step-000001/actor/shard-0"):
        downloaded(s3, tmp_path)


def test_what_was_uploaded_and_is_not_there_is_uploaded_again(url, local, tmp_path):
    """A server that loses a file, or keeps half of it, gets no manifest."""
    remote = remote_at(url)
    path = write(local, 1)

    def lose():
        remote.store.write("step-000001/actor/shard-0", b"half")
        return True

    put, lost = remote.store.put, []

    def put_and_lose(file, name, moved):
        put(file, name, moved)
        if name.endswith("shard-0") and not lost:
            lost.append(lose())

    remote.store.put = put_and_lose
    with pytest.raises(StoreError, match="actor/shard-0 was uploaded, and is not there as a whole"):
        remote.upload(1, path)
    assert remote.steps() == []
    assert remote.upload(1, path)
    assert contents(downloaded(url, tmp_path)) == contents(path)


def test_a_run_that_is_taken_over_goes_on_and_says_so(url, local):
    uploads, said = uploader_of(url, local), Said()
    write(local, 1)
    with held("upload.manifest", lambda: remote_at(url) is not None):
        uploads.start(said)
        assert wait_for(uploads.is_done, LIMIT_S)
    assert uploads.is_lost
    assert not uploads.finish(LIMIT_S, said)
    [(kind, text)] = said.lines
    assert kind == "warning"
    assert f"process {os.getpid()} on " in text
    assert RemoteCheckpoints(url).steps() == []


def test_a_damaged_one_is_left_and_said_and_costs_the_others_nothing(url, local):
    for step in (1, 2):
        remote_at(url).upload(step, write(local, step))
    remote = remote_at(url)
    remote.store.write("step-000001/state.json", b"{}")
    uploads, said = uploader_of(url, local, keep_last=1), Said()
    write(local, 3)
    uploads.start(said)
    assert uploads.finish(LIMIT_S, said)
    uploads.close()
    assert remote.steps() == [1, 3]
    [text] = [text for kind, text in said.lines if kind == "warning"]
    assert text.startswith(f"{url}/step-000001 is damaged: state.json")


def test_a_driver_that_was_started_again_goes_on_from_the_disk_without_an_answer(
    server, s3, local, tmp_path, monkeypatch
):
    said = []
    monkeypatch.setattr("hotseat.loop.state.checkpoints.CheckpointStore.newest", lambda store: None)
    saver = Saver(
        loads("", ["checkpoint.every=1", f"checkpoint.path={s3}", "checkpoint.resume=true"]), tmp_path / "run"
    )
    write(CheckpointStore(tmp_path / "run" / "checkpoints"), 1)
    server.trouble = lambda method, path: 503
    with ExitStack() as stack:
        with pytest.raises(StoreError):
            saver.find(stack, said.append)
        monkeypatch.setattr("hotseat.processes.kept_driver.restarts", (Restart(0.0, "died"),))
        assert saver.find(stack, said.append) is None
    assert said[0].startswith("warning: the newest checkpoint on disk counts")
    server.trouble = lambda method, path: None
    with saver.uploading(Said(), said.append):
        pass
    assert RemoteCheckpoints(s3).steps() == [1]
