"""Memory snapshots are there for the next driver, and for nobody and nothing else; one that fails costs no run."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import wait_until

from hotseat.config import loads
from hotseat.errors import CheckpointError, UserError
from hotseat.loop.state import memory_snapshots as module
from hotseat.loop.state.checkpoints import CheckpointStore
from hotseat.loop.state.memory_snapshots import POINTER, folder_of, memory_snapshots
from hotseat.loop.state.saving import CheckpointSource, Saver
from hotseat.processes import supervisor


class Said:
    def __init__(self):
        self.texts: list[str] = []

    def phase(self, name):
        pass

    def say(self, text, kind="note"):
        self.texts.append(text)


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setattr(module, "KEPT_S", 60.0)  # so that no supervisor outlives the tests for long


@pytest.fixture
def place(tmp_path):
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def write(path: Path) -> None:
    (path / "actor").mkdir()
    (path / "actor" / "weights").write_bytes(b"w" * 64)


def source(num_bytes: int = 64, writes=write) -> CheckpointSource:
    return CheckpointSource(lambda: num_bytes, writes, lambda path: path.mkdir(), dict)


def saver_of(run: Path, place: Path, *overrides: str) -> Saver:
    options = ["checkpoint.every=4", "checkpoint.memory_every=1", f"checkpoint.memory_path={place}"]
    return Saver(loads("", [*options, "checkpoint.background=false", *overrides]), run)


def steps_in(place: Path) -> list[int]:
    [folder] = place.iterdir()
    return CheckpointStore(folder).steps()


def die_after(run: Path, place: Path, num_steps: int) -> None:
    """Leave what a driver leaves that dies after some steps."""
    with ExitStack() as stack:
        saver = saver_of(run, place)
        saver.find(stack, str)
        for step in range(1, num_steps + 1):
            saver.after_step(step, source(), {}, Said())


def found(run: Path, place: Path, *overrides: str) -> tuple[int | None, list[str]]:
    """Return the step from which the next driver continues, and what it says."""
    said: list[str] = []
    with ExitStack() as stack:
        checkpoint = saver_of(run, place, "checkpoint.resume=true", *overrides).find(stack, said.append)
        assert checkpoint is None or (checkpoint.path / "actor" / "weights").read_bytes() == b"w" * 64
        return None if checkpoint is None else checkpoint.step, said


def test_one_snapshot_is_kept_and_the_newest_of_memory_and_disk_counts(run, place):
    die_after(run, place, 6)
    assert steps_in(place) == [6]
    [folder] = place.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder_of(run, place) == folder
    with ExitStack() as stack:
        saver = saver_of(run, place, "checkpoint.resume=true")
        checkpoint = saver.find(stack, str)
        assert checkpoint is not None
        assert checkpoint.path == folder / "step-000006"
        saver.after_step(7, source(), {}, Said())
        saver.after_step(8, source(), {}, Said())  # on disk, which is as good
        assert steps_in(place) == [7]
        back = saver.go_back()
        assert back is not None
        assert back.path == run / "checkpoints" / "step-000008"
        saver.finish(str)
    assert list(place.iterdir()) == []
    assert not (run / POINTER).exists()


def test_how_a_run_can_be_resumed_takes_account_of_its_snapshot(run, place):
    with ExitStack() as stack:
        saver = saver_of(run, place)
        saver.find(stack, str)
        saver.after_step(1, source(), {}, Said())
        assert saver.ending("again").endswith("the last checkpoint is of step 1. Resume with: again")
        saver.finish(str)  # which the snapshot does not outlive
        assert saver.resumable_step() is None


@pytest.mark.parametrize("num_steps", [3, 6])
def test_a_damaged_snapshot_is_named_and_deleted_and_the_disk_counts(run, place, num_steps):
    die_after(run, place, num_steps)
    [weights] = place.glob("*/step-*/actor/weights")
    weights.write_bytes(b"w" * 63 + b"v")
    step, said = found(run, place)
    assert step == (4 if num_steps == 6 else None)
    text = f"{weights.parents[1]} is damaged: actor/weights has other contents than were written; it is deleted, and"
    assert [each for each in said if text in each]


def test_one_that_is_not_finished_is_as_if_it_were_not_there(run, place):
    die_after(run, place, 5)
    [folder] = place.iterdir()
    (folder / "step-000005").rename(folder / ".writing-step-000006")
    assert found(run, place)[0] == 4


def test_a_run_that_was_resumed_elsewhere_or_begins_anew_does_not_see_an_older_snapshot(run, place, tmp_path):
    die_after(run, place, 6)
    elsewhere = tmp_path / "of another machine"
    elsewhere.mkdir()
    die = [path.rename(elsewhere / path.name) for path in place.iterdir()]
    assert found(run, place)[0] == 4
    die[0].rename(place / die[0].name)
    assert found(run, place)[0] == 4


def test_a_snapshot_is_not_used_once_the_run_went_on_without_snapshots(run, place):
    die_after(run, place, 6)
    with ExitStack() as stack:
        checkpoint = Saver(loads("", ["checkpoint.every=4", "checkpoint.resume=true"]), run).find(stack, str)
        assert checkpoint is not None
        assert checkpoint.step == 4
    assert found(run, place)[0] == 4


def test_a_copy_of_a_run_does_not_use_the_snapshots_of_the_run(run, place, tmp_path):
    die_after(run, place, 6)
    shutil.copytree(run, tmp_path / "copy")
    assert found(tmp_path / "copy", place)[0] == 4
    assert found(run, place)[0] == 6


def test_the_run_that_made_a_snapshot_uses_it_however_long_ago_that_was(run, place):
    die_after(run, place, 6)
    [folder] = place.iterdir()
    os.utime(folder, (0, 0))
    assert found(run, place)[0] == 6


def test_a_path_from_the_working_directory_is_known_elsewhere(run, place, monkeypatch):
    monkeypatch.chdir(place.parent)
    die_after(run, Path(place.name), 6)
    assert Path((run / POINTER).read_text().strip()).parent == place
    assert folder_of(run, Path(place.name)) == folder_of(run, place) is not None
    assert found(run, Path(place.name))[0] == 6


def test_a_folder_that_another_user_could_have_made_is_no_snapshot(run, place, tmp_path):
    die_after(run, place, 6)
    [folder] = place.iterdir()
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert folder_of(run, place) is None
    assert found(run, place)[0] == 4


def test_a_snapshot_that_cannot_be_written_is_warned_of_once_and_the_run_continues(run, place):
    def fails(path: Path) -> None:
        if path.parent.parent == place:
            raise OSError(28, "No space left on device")
        write(path)

    said = Said()
    with ExitStack() as stack:
        saver = saver_of(run, place)
        saver.find(stack, str)
        for step in (1, 2, 3, 4):
            saver.after_step(step, source(writes=fails), {}, said)
        assert saver.last_step() == 4
        assert steps_in(place) == []
        saver.after_step(5, source(), {}, said)
        assert steps_in(place) == [5]
    [text] = said.texts
    assert text.startswith("no memory snapshot is made, but the run continues, and tries again: no room for the")
    assert "Make room, or set checkpoint.memory_path to another disk" in text


def test_one_that_fails_in_the_background_does_not_end_the_run_either(run, place):
    def snapshot(path: Path):
        def is_written() -> bool:
            raise OSError(28, "No space left on device")

        return is_written

    said, failing = Said(), CheckpointSource(lambda: 64, write, lambda path: None, dict, snapshot=snapshot)
    with ExitStack() as stack:
        saver = saver_of(run, place, "checkpoint.background=true")
        saver.find(stack, str)
        saver.after_step(1, failing, {}, said)
        saver.wait()
    assert len(said.texts) == 1


def test_a_checkpoint_on_disk_that_fails_while_a_snapshot_is_due_ends_the_run(run, place):
    """The run does not wait for the disk to make a snapshot, and the error is not taken for one of the snapshot."""

    def snapshot(path: Path):
        calls = iter(range(20))

        def is_written() -> bool:
            if next(calls) < 9:  # over a second
                return False
            raise OSError(28, "No space left on device")

        return is_written

    said, failing = Said(), CheckpointSource(lambda: 64, write, lambda path: None, dict, snapshot=snapshot)
    with ExitStack() as stack:
        saver = saver_of(run, place, "checkpoint.background=true")
        saver.find(stack, str)
        saver.after_step(4, failing, {}, said)
        saver.save_if_due(5, source(), {}, said, False)
        with pytest.raises(CheckpointError, match=r"no room for the checkpoint of step 4 in .*/run/checkpoints"):
            saver.wait()
    assert said.texts == []


def test_a_place_that_cannot_be_written_is_named(run, place):
    with pytest.raises(UserError, match=r"checkpoint.memory_path: .*/none cannot be written: No such file"):
        saver_of(run, place / "none").find(ExitStack(), str)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the supervisor needs Linux")
@pytest.mark.parametrize("is_continued", [False, True])
def test_after_a_kill_it_stays_for_the_next_driver_and_not_for_ever(run, place, is_continued):
    """The supervisor of a driver that was killed removes it after a time, unless another driver has taken it over."""
    program = (
        "import sys, time; from pathlib import Path; from hotseat.loop.state import memory_snapshots as module\n"
        "place, run, module.KEPT_S = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])\n"
        "with module.memory_snapshots(place, run, is_resumed=False, is_needed=lambda: True) as store:\n"
        "    store.begin(1, 0); store.commit(1, {}); print('saved', flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(place), str(run), "600" if is_continued else "1.5"]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"saved\n"
    [folder] = place.iterdir()
    [guard] = [pid for pid in children_of(driver.pid) if b"supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    driver.kill()
    driver.communicate()
    if not is_continued:
        wait_until(lambda: not folder.exists())
        return
    with memory_snapshots(place, run, is_resumed=True, is_needed=lambda: True) as store:
        assert store.steps() == [1]
        wait_until(lambda: supervisor.process_state(guard) == "gone")
        assert store.steps() == [1]
    with memory_snapshots(place, run, is_resumed=True, is_needed=lambda: False) as store:
        assert store.steps() == [1]
    assert not folder.exists()


def test_one_that_is_taken_over_in_the_last_moment_is_not_removed(tmp_path, monkeypatch):
    (tmp_path / ".lock").write_text("process 1")
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= 60:
            (tmp_path / ".lock").write_text("process 2")

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    lock = str(tmp_path / ".lock")
    supervisor._clean_up_if_nobody_continues(
        {"mark": ("HOTSEAT_MEMORY", "none"), "folders": [str(tmp_path)], "kept": (lock, "process 1", 60.0)}
    )
    assert (tmp_path / ".lock").exists()


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_what_nobody_removed_is_removed_by_the_next_run(run, place, tmp_path):
    die_after(run, place, 2)
    [left] = place.iterdir()
    (tmp_path / "other").mkdir()
    with memory_snapshots(place, tmp_path / "other", is_resumed=False, is_needed=lambda: False):
        assert left.exists()  # it may be resumed yet
        os.utime(left, (0, 0))
        with memory_snapshots(place, run, is_resumed=False, is_needed=lambda: False):
            assert not left.exists()
            assert len(list(place.iterdir())) == 2
