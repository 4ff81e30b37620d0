"""Checkpoints on disk: complete or absent, and every damage named."""

import contextlib
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hotseat.errors import CheckpointError
from hotseat.loop.state.checkpoints import CheckpointStore


def write(store: CheckpointStore, step: int, *, text: str = "weights", best_metric: float | None = None) -> Path:
    path = store.begin(step, 100)
    (path / "actor").mkdir()
    (path / "actor" / "shard-0").write_text(f"{text} of {step}")
    return store.commit(step, {"step": step, "best_metric": best_metric})


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep_last=2)


def test_the_newest_complete_one_is_current(store):
    assert store.newest() is None
    write(store, 9)
    write(store, 10)
    found = store.newest()
    assert (found.step, found.state["step"]) == (10, 10)
    assert (found.path / "actor" / "shard-0").read_text() == "weights of 10"


def test_what_was_not_committed_does_not_exist(store):
    write(store, 1)
    path = store.begin(2, 100)
    (path / "shard").write_text("half")
    assert store.newest().step == 1
    assert store.clean() == ["step-000002"]
    assert not path.exists()
    assert store.newest().step == 1


def test_old_ones_go_after_the_new_one_is_there_and_the_best_stays(store):
    for step, metric in ((1, 0.1), (2, 0.9), (3, 0.3), (4, 0.4), (5, None)):
        write(store, step, best_metric=metric)
    assert store.steps() == [2, 4, 5]


def test_together_they_stay_below_the_bound_but_for_the_newest_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=5, max_bytes=3000)
    for step in range(1, 5):
        write(store, step, text="x" * 1000, best_metric=1.0 if step == 1 else 0.0)
    assert store.steps() == [1, 4]


def test_a_checkpoint_is_never_overwritten(store):
    write(store, 1)
    store.begin(1, 100)
    with pytest.raises(CheckpointError, match="step-000001 is there already"):
        store.commit(1, {})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "actor" / "shard-0").write_text("weights of 3"), "shard-0 has other contents"),
        (lambda p: (p / "actor" / "shard-0").write_text("short"), "shard-0 has 5 bytes, 12 were written"),
        (lambda p: (p / "actor" / "shard-0").unlink(), "shard-0 is missing"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json cannot be read"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda p: rewrite(p / "manifest.json", files=[["a", {}]]), "no table of files"),
        (lambda p: (p / "extra").touch(), "extra is not in the manifest"),
        (lambda p: (p / "state.json").write_text("{}"), "state.json has"),
    ],
)
def test_damage_is_named_and_never_skipped(store, damage, message):
    """Scenarios 20 and 21."""
    write(store, 1)
    damage(write(store, 2))
    with pytest.raises(
        CheckpointError, match=f"step-000002 is damaged: .*{message}.*remove it to resume from step-000001"
    ):
        store.newest()


def test_a_checkpoint_of_another_format_is_refused(store):
    rewrite(write(store, 1) / "manifest.json", format=1)
    with pytest.raises(CheckpointError, match=r"manifest\.json has format 1, this version reads 2"):
        store.newest()


def test_any_flipped_bit_of_a_manifest_is_found(store):
    manifest = write(store, 1) / "manifest.json"
    data = manifest.read_bytes()
    for at, byte in enumerate(data):
        for bit in (0, 5):  # another letter or number, and capitals
            manifest.write_bytes(data[:at] + bytes([byte ^ 1 << bit]) + data[at + 1 :])
            with pytest.raises(CheckpointError, match="step-000001 is damaged"):
                store.newest()
    manifest.write_bytes(data)
    assert store.newest() is not None


def test_a_name_cannot_leave_the_directory(store, tmp_path):
    """Scenario 47."""
    (tmp_path / "outside").write_text("weights of 1")
    path = write(store, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../outside"] = manifest["files"]["actor/shard-0"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="outside is missing"):
        store.newest()
    shutil.rmtree(path)
    path = write(store, 1)
    (path / "actor" / "shard-0").unlink()
    (path / "actor" / "shard-0").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="shard-0 is missing"):
        store.newest()


def test_a_checkpoint_that_is_a_link_is_neither_read_nor_deleted(store, tmp_path):
    said = []
    store.warn = said.append
    for step in (1, 2):
        outside = write(store, step).rename(tmp_path / f"outside-{step}")
        (store.directory / f"step-{step:06}").symlink_to(outside)
    with pytest.raises(CheckpointError, match=rf"step-000002 is a link to {tmp_path}/outside-2, which is not followed"):
        store.newest()
    for step in range(3, 7):
        write(store, step)
    assert said == [f"{store.directory}/step-{step:06} is a link, and is left as it is" for step in (1, 2)]
    assert {1, 2} < set(store.steps())


def test_a_full_disk_is_noticed_before_anything_is_written(store):
    with pytest.raises(CheckpointError, match=r"[\d,]+ are free; there is no earlier checkpoint\. Make room"):
        store.begin(1, 1 << 60)
    write(store, 1)
    with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes, [\d,]+ are free; earlier checkpoints are intact"):
        store.begin(2, 1 << 60)
    assert store.newest().step == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_named(store):
    write(store, 1)
    store.directory.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="cannot be written: Permission denied"):
            store.begin(2, 100)
    finally:
        store.directory.chmod(0o700)


WRITER = """
import sys
from pathlib import Path
from hotseat.loop.state.checkpoints import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep_last=3)
step = 1
while True:
    path = store.begin(step, 100)
    for shard in range(4):
        (path / f"shard-{shard}").write_bytes(bytes([step % 256]) * 300_000)
    store.commit(step, {"step": step})
    print(step, flush=True)
    step += 1
"""


@pytest.mark.slow
def test_killed_at_any_moment_the_newest_is_whole(tmp_path):
    """Scenarios 10 and 11: a writer is killed at 20 random moments."""
    rng = random.Random(0)
    for attempt in range(20):
        directory = tmp_path / str(attempt)
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        last = 0
        for _ in range(rng.randrange(1, 4)):
            last = int(writer.stdout.readline())
        with contextlib.suppress(subprocess.TimeoutExpired):
            writer.wait(rng.random() * 0.03)
        writer.send_signal(signal.SIGKILL)
        writer.wait(60)
        writer.stdout.close()
        store = CheckpointStore(directory)
        store.clean()
        found = store.newest()
        assert found.step >= last
        contents = {path.read_bytes() for path in found.path.glob("shard-*")}
        assert contents == {bytes([found.step % 256]) * 300_000}


def listed(folder: Path, rank: int, **files: str) -> None:
    """What a rank leaves in its folder of a checkpoint: files, and the list of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / f"rank-{rank}.json").write_text(json.dumps({name: len(text) for name, text in files.items()}))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda folder: (folder / "rank-1.json").unlink(), "actor has no file of rank 1 of 2"),
        (lambda folder: (folder / "shard1").unlink(), "actor/shard1 of rank 1 is missing or not whole"),
        (lambda folder: (folder / "shard1").write_text("w"), "actor/shard1 of rank 1 is missing or not whole"),
        (shutil.rmtree, "actor has no file of rank 0 of 2; actor has no file of rank 1 of 2"),
    ],
    ids=["list", "file", "part", "all"],
)
def test_a_checkpoint_without_the_files_of_every_rank_is_not_committed(tmp_path, loss, message):
    """As on nodes that do not share the folder: what other ranks wrote is on their disks."""
    store = CheckpointStore(tmp_path, patience_s=0.0)
    write(store, 1)
    folder = store.begin(2, 100) / "actor"
    listed(folder, 0, shard0="weights")
    listed(folder, 1, shard1="weights")
    loss(folder)
    with pytest.raises(CheckpointError, match=f"step 2 is not complete in .*: {message}. Every rank has to write to"):
        store.commit(2, {}, {"actor": 2})
    assert store.steps() == [1]


def test_files_of_another_node_may_appear_late(tmp_path):
    store = CheckpointStore(tmp_path)
    folder = store.begin(1, 100) / "actor"
    listed(folder, 0, shard0="weights")
    late = threading.Timer(0.2, listed, (folder, 1), {"shard1": "weights"})
    late.start()
    store.commit(1, {}, {"actor": 2})
    assert store.newest().step == 1


@pytest.mark.parametrize("state", ["", "[]", "{", '{"best_metric": "much"}', None], ids=str)
def test_an_older_one_that_cannot_be_read_is_left_alone_and_warned_of_once(store, state):
    said = []
    store.warn = said.append
    broken = write(store, 1) / "state.json"
    broken.unlink()
    if state is not None:
        broken.write_text(state)
    for step in (2, 3, 4, 5):
        write(store, step, best_metric=float(step))
    assert store.steps() == [1, 4, 5]
    [text] = said
    assert text.startswith(f"{broken.parent} cannot be read (")
    assert text.endswith("), and is left as it is")


def test_only_this_user_reads_states_with_secrets(tmp_path):
    for is_private, mode in ((True, 0o600), (False, 0o666 & ~_umask())):
        store = CheckpointStore(tmp_path / str(is_private), is_private=is_private)
        assert stat.S_IMODE((write(store, 1) / "state.json").stat().st_mode) == mode


def _umask() -> int:
    """Of this process; asking sets it."""
    umask = os.umask(0o022)
    os.umask(umask)
    return umask
