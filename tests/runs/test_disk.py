"""Disks that fill up or cannot be written, and writers that are killed while they write."""

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from loop_cases import REWARD, make_task, rl_yaml
from safetensors.torch import load_file

from hotseat.config import loads
from hotseat.errors import CheckpointError, UserError
from hotseat.loop.run import start
from hotseat.loop.state.checkpoints import CheckpointStore

HAS_MOUNTS = bool(shutil.which("unshare")) and not subprocess.run(["unshare", "-rm", "true"]).returncode

# Writes step 1, then step 2 under the fault that is named on the command line.
WRITER = """
import os, resource, signal, sys
from pathlib import Path
from hotseat.loop.state.checkpoints import CheckpointStore

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

store, fault = CheckpointStore(Path(sys.argv[1]), keep_last=int(sys.argv[3])), sys.argv[2]
for step in (1, 2):
    if step == 2 and fault.isdigit():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel ends who writes past so many bytes of a file
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(fault), resource.RLIM_INFINITY))
    path = store.begin(step, 100)
    for shard in range(2):
        (path / f"shard-{shard}").write_bytes(bytes([step]) * 100_000)
    if step == 2 and fault == "before the manifest":
        import hotseat.loop.state.checkpoints as checkpoints
        checkpoints.file_facts = die
    if step == 2 and fault == "before the rename":
        os.rename = Path.rename = die
    if step == 2 and fault == "before old ones go":
        CheckpointStore._delete_old = die
    store.commit(step, {"step": step})
"""


def write(directory: Path, fault: str, keep_last: int = 3) -> int:
    return subprocess.run([sys.executable, "-c", WRITER, str(directory), fault, str(keep_last)], timeout=300).returncode


@pytest.mark.slow
def test_killed_at_any_byte_the_earlier_one_is_whole(tmp_path):
    """Scenario 10: the kernel ends the writer at 20 random bytes of a shard."""
    chosen = random.Random(0)
    for attempt in range(20):
        directory = tmp_path / str(attempt)
        assert write(directory, str(chosen.randrange(100_000))) == -signal.SIGXFSZ
        store = CheckpointStore(directory)
        assert store.newest().step == 1
        assert store.clean() == ["step-000002"]  # what the run tells its user
        assert [path.name for path in directory.iterdir()] == ["step-000001"]


@pytest.mark.parametrize(
    ("fault", "newest"), [("before the manifest", 1), ("before the rename", 1), ("before old ones go", 2)]
)
@pytest.mark.parametrize("keep_last", [1, 3])
def test_killed_around_the_commit_one_is_whole(tmp_path, fault, newest, keep_last):
    """Scenario 11: all data is written, and the rename that makes it a checkpoint is not."""
    assert write(tmp_path, fault, keep_last) == -signal.SIGKILL
    found = CheckpointStore(tmp_path).newest()
    assert found.step == newest
    assert {path.read_bytes() for path in found.path.glob("shard-*")} == {bytes([newest]) * 100_000}


@pytest.mark.parametrize("kind", [RuntimeError, BaseException, OSError])
def test_a_disk_that_fills_up_while_it_is_written(tmp_path, kind):
    """Scenarios 16 and 17 without a small disk: whoever writes, and in whatever words it tells."""
    store = CheckpointStore(tmp_path, keep_last=1)

    def write(step: int, text: str, error: BaseException | None = None) -> None:
        with store.writing(step, 100) as path:
            (path / "shard").write_text(text)
            if error is not None:
                raise error
        store.commit(step, {})

    write(1, "weights")
    with pytest.raises(CheckpointError) as caught:
        write(2, "weigh", kind("rank 0: OSError: [Errno 28] No space left on device"))
    assert f"no room for the checkpoint of step 2 in {tmp_path}" in str(caught.value)
    assert "full after 5 bytes" in str(caught.value)
    assert "earlier checkpoints are intact. Make room, or set checkpoint.path" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    with pytest.raises(ZeroDivisionError):
        write(2, "weights", ZeroDivisionError())  # what has another cause is not explained away
    assert store.newest().step == 1


# Step 1 fits on the disk, step 2 does not: at its shard, or with a shard that leaves one page, only at its manifest.
SMALL_DISK = """
import sys
from pathlib import Path
from hotseat.errors import CheckpointError
from hotseat.loop.state import checkpoints
checkpoints._SPARE_BYTES = 0
store = checkpoints.CheckpointStore(Path(sys.argv[1]), keep_last=1)
for step, size in ((1, 50_000), (2, int(sys.argv[2]))):
    try:
        with store.writing(step, 0) as path:
            (path / "shard").write_bytes(bytes([step]) * size)
        store.commit(step, {"step": step})
    except CheckpointError as error:
        print(error)
assert store.newest().step == 1
assert (store.newest().path / "shard").read_bytes() == bytes([1]) * 50_000
"""


@pytest.mark.skipif(not HAS_MOUNTS, reason="needs `unshare -rm`")
@pytest.mark.parametrize("size", [150_000, 131_072])
def test_on_a_disk_that_is_full_the_only_earlier_one_stays(tmp_path, size):
    """Scenario 17: a real disk, with room for one of the two."""
    (tmp_path / "write.py").write_text(SMALL_DISK)
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"mount -t tmpfs -o size=192k none {disk} && exec {sys.executable} {tmp_path}/write.py {disk} {size}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"no room for the checkpoint of step 2 in {disk}: the disk was full after " in done.stdout


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere"])
def test_a_place_that_cannot_be_written(tmp_path, place):
    """Scenario 19: said when a run starts."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"{place} cannot be written: .*; set checkpoint.path to another place"):
        CheckpointStore(tmp_path / place).prepare()


def test_a_place_that_can_be_written_is_left_as_it_is(tmp_path):
    CheckpointStore(tmp_path / "a" / "b").prepare()
    CheckpointStore(tmp_path / "a" / "b").prepare()
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.skipif(not HAS_MOUNTS, reason="needs `unshare -rm`")
def test_a_disk_that_is_mounted_for_reading(tmp_path):
    """Scenario 19: where even root may not write."""
    imports = "from pathlib import Path; from hotseat.loop.state.checkpoints import CheckpointStore"
    code = f"{imports}; CheckpointStore(Path({str(tmp_path)!r}))"
    script = f"mount -t tmpfs -o ro none {tmp_path} && exec {sys.executable} -c {code + '.prepare()'!r}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=300)
    assert f"{tmp_path} cannot be written: Read-only file system" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not HAS_MOUNTS, reason="needs `unshare -rm`")
@pytest.mark.long
@pytest.mark.parametrize("keep_last", [1, 9])
def test_a_run_stops_at_a_full_disk_and_resumes_when_there_is_room(tmp_path, keep_last):
    """Scenarios 16 and 17: with the numbers; what was saved before is whole, and the end is bit for bit the same."""
    task = make_task(tmp_path)
    start(loads(rl_yaml(task, name="whole"), ["train.num_episodes=4"]))
    disk = tmp_path / "disk"
    disk.mkdir()
    options = f"train.num_episodes=4 checkpoint.every=1 checkpoint.keep_last={keep_last} checkpoint.path={disk}"
    options += " checkpoint.background=false"  # so that the disk is full at a certain step
    (task / "run.yaml").write_text(rl_yaml(task))
    hotseat = f"{sys.executable} -m hotseat.cli.main"
    # A checkpoint wants 16 MiB to spare. From step 3 on, somebody else has filled the disk up to less than that.
    full, room = disk / "step-000002", task / "room"
    fill = f"    import os\n    if os.path.exists('{full}') and not os.path.exists('{room}'):\n"
    fill += f"        open('{disk}/theirs', 'wb').write(bytes(2 << 20))\n    return"
    (task / "reward.py").write_text(REWARD.replace("    return", fill))
    script = f"""
        mount -t tmpfs -o size=17m none {disk}
        {hotseat} run {task}/run.yaml {options}
        echo "ended with $?, has $(cd {disk}; echo step-*)"
        touch {room}; mount -o remount,size=64m {disk}
        {hotseat} resume {task}/runs/run
        echo "ended with $?"
    """
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=400)
    assert f"hotseat: no room for the checkpoint of step 3 in {disk}: it needs " in done.stderr
    assert "bytes, 15," in done.stderr
    assert "are free; earlier checkpoints are intact. Make room, or set checkpoint.path to another disk" in done.stderr
    kept = "step-000002" if keep_last == 1 else "step-000001 step-000002"
    assert f"ended with 1, has {kept}\n" in done.stdout
    assert f"resuming from {disk}/step-000002, after step 2" in done.stdout
    assert done.stdout.endswith("ended with 0\n"), done.stderr[-3000:]
    ends = [load_file(task / "runs" / name / "model" / "model.safetensors") for name in ("whole", "run")]
    assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])
