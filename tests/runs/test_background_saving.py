"""Checkpoints that are written while the run goes on."""

import functools
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from traceback import StackSummary

import pytest
import torch
import torch.distributed.checkpoint as dcp
from loop_cases import make_task, rl_yaml, sft_yaml
from paused_runs import arm, end_stopped, held, started, wait_for, wait_until_stopped
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from hotseat import faults
from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.errors import CheckpointError, DeadlineError, RunError
from hotseat.faults import Fault
from hotseat.loop.run import start
from hotseat.loop.state.checkpoints import CheckpointStore
from hotseat.loop.state.saving import CheckpointSource, Saver
from hotseat.machine import available_bytes
from hotseat.observe import NullJournal, read_lines
from hotseat.observe.timeline import read_timeline
from hotseat.train.checkpoint_files import MetadataReader

PASSES = "train.num_episodes=4"  # eight steps of rl


@contextmanager
def armed(task: Path, *found: Fault):
    """This process meets with faults: in the local runtime it is every process of a run."""
    arm(task / "faults", found)
    before, faults._directory = faults._directory, task / "faults"
    faults._seen.clear()
    try:
        yield
    finally:
        faults._directory = before


def run(task: Path, kind: str, name: str, *overrides: str) -> Path:
    text = rl_yaml(task, name=name) if kind == "rl" else sft_yaml(task, name=name)
    start(loads(text, [*([PASSES] if kind == "rl" else []), *overrides]))
    return task / "runs" / name


def same(one: Path, other: Path) -> bool:
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (one, other))
    return all((ours[name] == theirs[name]).all() for name in ours)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[[str], Path]:
    """Make a run of a kind that nothing disturbs, once for all tests, and return its directory."""
    task = make_task(tmp_path_factory.mktemp("whole"))
    return functools.cache(lambda kind: run(task, kind, f"whole-{kind}"))


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Everything that the trainer saved."""
    reader = MetadataReader(checkpoint / "actor")
    facts = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in facts.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def state_of(checkpoint: Path) -> dict:
    state = json.loads((checkpoint / "state.json").read_text())
    del state["config"], state["run"]  # which have the name of the run
    return state


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rl", pytest.param("sft", marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_steps_continue_and_the_checkpoint_is_of_its_own_step(task, kind):
    """The write of step 2 takes until after step 4: the steps do not wait, and nothing of theirs is in it."""
    at_once = run(task, kind, "at-once", "checkpoint.every=2", "checkpoint.keep_last=9", "checkpoint.background=false")

    def wait_for_step_4() -> bool:
        metrics = task / "runs" / "behind" / "metrics.jsonl"
        is_made = wait_for(lambda: read_lines(metrics)[-1]["step"] >= 4, 300)
        time.sleep(0.5)  # so long the save after it has to wait
        return is_made

    with held("save.during", wait_for_step_4):
        behind = run(task, kind, "behind", "checkpoint.every=2", "checkpoint.keep_last=9", "checkpoint.background=true")
    for step in (2, 4, 6, 8):
        ours, theirs = (path / "checkpoints" / f"step-{step:06}" for path in (behind, at_once))
        assert state_of(ours) == state_of(theirs)
        assert kind == "sft" or (ours / "ledger.jsonl").read_bytes() == (theirs / "ledger.jsonl").read_bytes()
        tensors, expected = stored(ours), stored(theirs)
        assert tensors.keys() == expected.keys()
        assert [name for name in tensors if not torch.equal(tensors[name], expected[name])] == []
    assert same(behind, at_once)
    assert [line["step"] for line in read_lines(behind / "metrics.jsonl") if "time/save" in line] == [3, 5, 7]
    assert not [event for event in read_timeline(behind / "timeline.json") if event["name"] == "is_written"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_an_error_in_the_background_ends_the_run(task, kind, whole):
    with (
        armed(task, Fault("save.during", "raise", skip=1)),
        pytest.raises(RunError, match="a fault at save.during") as caught,
    ):
        run(task, kind, "run", "checkpoint.every=2", "checkpoint.background=true")
    steps = [line["step"] for line in read_lines(task / "runs" / "run" / "metrics.jsonl")]
    assert 4 <= steps[-1] <= 6  # at the next save at the latest: steps take milliseconds
    assert f"resume after step 2: hotseat resume {task}/runs/run" in caught.value.__notes__
    assert main(["resume", str(task / "runs" / "run")]) == 0
    assert same(task / "runs" / "run", whole(kind))


@pytest.mark.slow
def test_an_error_in_the_last_save_is_not_lost(task):
    with armed(task, Fault("save.during", "raise", skip=3)), pytest.raises(RunError, match="a fault at save.during"):
        run(task, "sft", "run", "checkpoint.every=2", "checkpoint.background=true")
    assert not (task / "runs" / "run" / "model").exists()


@pytest.mark.long
@pytest.mark.slow
def test_a_run_that_fails_keeps_the_checkpoint_that_was_being_written(task):
    """An update of step 5 fails while step 4 is being written."""
    with (
        armed(task, Fault("save.during", "1", skip=1), Fault("update.before", "raise", skip=4)),
        pytest.raises(RunError, match="a fault at update.before") as caught,
    ):
        run(task, "rl", "run", "checkpoint.every=2", "checkpoint.background=true")
    assert f"resume after step 4: hotseat resume {task}/runs/run" in caught.value.__notes__
    assert CheckpointStore(task / "runs" / "run" / "checkpoints").newest().step == 4


IN_BACKGROUND = (PASSES, "checkpoint.every=2", "checkpoint.background=true")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "newest"),
    [
        # Of step 5, while step 4 is being written.
        pytest.param(Fault("update.before", "kill", skip=4), 2, marks=pytest.mark.long),
        (Fault("save.commit", "kill", skip=1), 2),
        pytest.param(Fault("save.after", "kill", skip=1), 4, marks=pytest.mark.long),
    ],
)
def test_killed_while_it_is_written_the_one_before_is_whole(task, fault, newest, whole):
    """Scenarios 10 and 11, in the background: and the resumed run ends with the same bits."""
    slow = [Fault("save.during", "30", skip=1)] if newest == 2 and fault.point == "update.before" else []
    with started(task, *IN_BACKGROUND, planned=[*slow, fault]) as driver:
        driver.communicate(timeout=860)
    assert driver.returncode == -signal.SIGKILL
    assert CheckpointStore(task / "runs" / "run" / "checkpoints").newest().step == newest
    assert [path.name for path in (task / "runs" / "run" / "checkpoints").glob(".writing-*")] == (
        [".writing-step-000004"] if newest == 2 else []
    )
    assert main(["resume", str(task / "runs" / "run")]) == 0
    assert same(task / "runs" / "run", whole("rl"))
    assert (task / "runs" / "run" / "ledger.jsonl").read_bytes() == (whole("rl") / "ledger.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.long
def test_sigterm_waits_for_the_one_under_way_and_saves_another(task):
    found = [Fault("save.during", "2", skip=1), Fault("update.before", "stop", skip=4)]
    with started(task, *IN_BACKGROUND, planned=found) as driver:
        wait_until_stopped(driver)
        end_stopped(driver)  # step 5 is under way, step 4 is being written
        out, _ = driver.communicate(timeout=860)
    assert driver.returncode == 130
    assert "saved " in out
    assert CheckpointStore(task / "runs" / "run" / "checkpoints").steps() == [2, 4, 5]


# --- the saver alone --------------------------------------------------------------------------------------------------


class Ranks:
    """What a task has to save, without one."""

    def __init__(self):
        self.is_written = False
        self.error: BaseException | None = None
        self.written: list[str] = []
        self.step = 0
        self.on_write: Callable[[], object] = lambda: None

    def parts(self) -> CheckpointSource:
        def write(path: Path) -> None:
            (path / "shard").write_text(f"weights of {self.step}")
            self.written.append("at once")
            self.on_write()

        def snapshot(path: Path):
            text = f"weights of {self.step}"
            self.written.append("behind")
            self.on_write()

            def is_written() -> bool:
                if self.error is not None:
                    raise self.error
                if self.is_written:
                    (path / "shard").write_text(text)
                return self.is_written

            return is_written

        return CheckpointSource(
            num_bytes=lambda: 100,
            write=write,
            export=lambda path: self.written.append("model"),
            state=lambda: {"at": [self.step]},
            snapshot=snapshot,
        )


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def saver_of(tmp_path: Path, *overrides: str) -> Saver:
    return Saver(loads("", ["checkpoint.every=1", "checkpoint.background=true", *overrides]), tmp_path)


def save(saver: Saver, ranks: Ranks, step: int) -> None:
    ranks.step = step
    saver.after_step(step, ranks.parts(), {}, NullJournal())


def test_it_is_there_when_the_ranks_have_written_and_not_before(tmp_path, ranks):
    saver = saver_of(tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints")
    with saver.settled(NullJournal()):
        save(saver, ranks, 1)
        ranks.step = 7  # the run goes on
        time.sleep(0.2)
        assert store.steps() == []
        ranks.is_written = True
    found = store.newest()
    assert (found.step, found.state["at"], (found.path / "shard").read_text()) == (1, [1], "weights of 1")


def test_no_second_one_begins_before_the_first_is_there(tmp_path, ranks):
    saver = saver_of(tmp_path, "cluster.call_timeout_s=0.3")
    save(saver, ranks, 1)
    with pytest.raises(DeadlineError, match=r"checkpoint of step 1 was not written in 0.3 s: set cluster.call_timeout"):
        save(saver, ranks, 2)
    assert ranks.written == ["behind"]


@pytest.mark.parametrize("kind", [OSError, RuntimeError, BaseException])
def test_a_disk_that_fills_up_in_the_background_raises_the_usual_error(tmp_path, ranks, kind):
    saver = saver_of(tmp_path)
    save(saver, ranks, 1)
    ranks.error = kind("rank 0: OSError: [Errno 28] No space left on device")
    time.sleep(0.2)
    with pytest.raises(
        CheckpointError, match=r"no room for the checkpoint of step 1 in .*; there is no earlier checkpoint"
    ):
        save(saver, ranks, 2)
    assert ranks.written == ["behind"]
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no rank could write"), CheckpointException("write", {0: (ValueError("a pickle"), StackSummary())})],
    ids=["Exception", "BaseException"],
)
def test_an_error_in_the_background_is_raised_by_the_next_save_as_it_is(tmp_path, ranks, error):
    """The second is how torch reports what failed on some rank."""
    assert isinstance(error, Exception) == isinstance(error, RuntimeError)
    saver = saver_of(tmp_path, "cluster.call_timeout_s=120")
    save(saver, ranks, 1)
    ranks.error = error
    with pytest.raises(type(error)) as caught:
        save(saver, ranks, 2)
    assert caught.value is error
    assert ranks.written == ["behind"]


def test_a_stop_saves_at_once_after_what_is_under_way(tmp_path, ranks):
    saver = saver_of(tmp_path)
    ranks.is_written = True
    save(saver, ranks, 1)
    saver.is_stopping = True
    with pytest.raises(KeyboardInterrupt), saver.settled(NullJournal()):
        save(saver, ranks, 2)
    assert ranks.written == ["behind", "at once"]
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [1, 2]


def test_a_stop_that_comes_after_the_question_of_saving_waits_for_the_next_step(tmp_path, ranks, monkeypatch):
    saver = saver_of(tmp_path)
    ranks.is_written = True
    asked = Saver.is_due

    def is_due(self, step, is_stopping):
        due = asked(self, step, is_stopping)
        self.is_stopping = True  # a signal, right after
        return due and step > 1

    monkeypatch.setattr(Saver, "is_due", is_due)
    save(saver, ranks, 1)  # not saved, so it must not end here
    with pytest.raises(KeyboardInterrupt), saver.settled(NullJournal()):
        save(saver, ranks, 2)
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [2]


@pytest.mark.parametrize("is_behind", [True, False])
def test_a_stop_that_comes_while_it_is_saved_needs_no_other_step(tmp_path, ranks, is_behind):
    saver = saver_of(tmp_path, f"checkpoint.background={str(is_behind).lower()}")
    ranks.is_written = True
    ranks.on_write = lambda: setattr(saver, "is_stopping", True)
    with pytest.raises(KeyboardInterrupt), saver.settled(NullJournal()):
        save(saver, ranks, 1)
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [1]


@pytest.mark.slow
def test_an_interrupt_gives_up_what_is_under_way(tmp_path, ranks):
    saver = saver_of(tmp_path)
    started_s = time.monotonic()
    save(saver, ranks, 1)
    with pytest.raises(KeyboardInterrupt), saver.settled(NullJournal()):
        raise KeyboardInterrupt
    assert time.monotonic() - started_s < 10  # it does not wait for the ranks
    ranks.is_written = True
    time.sleep(1)
    assert CheckpointStore(tmp_path / "checkpoints").steps() == []


def test_a_checkpoint_that_was_given_up_never_becomes_current(tmp_path, ranks):
    """All of it is written and hashed when the run is interrupted: another run may have the folder from then on."""
    saver, committing, given_up = saver_of(tmp_path), threading.Event(), threading.Event()
    ranks.is_written = True

    def wait() -> bool:
        committing.set()
        return given_up.wait(60)

    with held("save.commit", wait):
        save(saver, ranks, 1)
        under_way = saver._background_save
        assert committing.wait(60)
        with pytest.raises(KeyboardInterrupt), saver.settled(NullJournal()):
            raise KeyboardInterrupt
        given_up.set()
        assert isinstance(under_way.done.exception(60), CheckpointError)
    assert CheckpointStore(tmp_path / "checkpoints").steps() == []


def test_the_error_of_the_run_is_raised_not_that_of_its_last_save(tmp_path, ranks):
    saver = saver_of(tmp_path)
    save(saver, ranks, 1)
    ranks.error = RuntimeError("the ranks are gone")
    with pytest.raises(ZeroDivisionError), saver.settled(NullJournal()):
        raise ZeroDivisionError


def test_unset_it_is_in_the_background_where_memory_has_room(tmp_path, ranks, monkeypatch):
    for room, way in ((199, "at once"), (200, "behind")):
        monkeypatch.setattr("hotseat.loop.state.saving.available_bytes", lambda room=room: room)
        saver = Saver(loads("", ["checkpoint.every=1"]), tmp_path / way)
        ranks.is_written, ranks.written = True, []
        with saver.settled(NullJournal()):
            save(saver, ranks, 1)
        assert ranks.written == [way]


def test_memory_that_is_available(tmp_path):
    assert available_bytes(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 16 kB\nMemFree: 2 kB\nMemAvailable: 8 kB\n")
    assert available_bytes(tmp_path) == 8192
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("5000\n")
    (group / "memory.stat").write_text("anon 4000\ninactive_file 700\n")
    (group / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == 8192
    (group / "memory.max").write_text("6000\n")
    assert available_bytes(tmp_path) == 1700
    shutil.rmtree(tmp_path / "proc")
    assert available_bytes(tmp_path) == 0
