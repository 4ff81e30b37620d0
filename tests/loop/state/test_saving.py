"""Checkpoints by time: without being asked, cheap, the same on all ranks; and what an interrupted run says."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from loop_cases import make_task, sft_yaml

from hotseat.config import loads
from hotseat.errors import ConfigError
from hotseat.loop.run import start
from hotseat.loop.state.checkpoints import CheckpointStore
from hotseat.loop.state.saving import CheckpointSource, Saver

COMMAND = "hotseat resume runs/x"


class Clock:
    """Minutes that pass when a test says so, and while something is written."""

    def __init__(self, minutes_per_save: float = 0.0):
        self.minutes, self.minutes_per_save = 0.0, minutes_per_save

    def __call__(self) -> float:
        return self.minutes * 60

    def parts(self, num_bytes: int = 0) -> CheckpointSource:
        def write(path: Path) -> None:
            (path / "actor").mkdir()
            self.minutes += self.minutes_per_save

        return CheckpointSource(lambda: num_bytes, write, lambda path: path.mkdir(), dict)


class Said:
    """A journal that keeps what it is told."""

    def __init__(self):
        self.texts: list[str] = []

    def phase(self, name):
        pass

    def say(self, text, kind="note"):
        self.texts.append(text)


def steps_saved(tmp_path: Path, clock: Clock, num_steps: int, *overrides: str) -> list[int]:
    """Of steps that take a minute each."""
    options = ["checkpoint.keep_last=1000", "checkpoint.background=false", *overrides]
    saver = Saver(loads("", options), tmp_path, clock=clock)
    for step in range(1, num_steps + 1):
        clock.minutes += 1
        saver.after_step(step, clock.parts(), {}, Said())
    return CheckpointStore(tmp_path / "checkpoints").steps()


def test_by_default_a_checkpoint_is_made_every_ten_minutes(tmp_path):
    assert steps_saved(tmp_path, Clock(), 25) == [10, 20]


def test_minutes_and_steps_are_as_they_are_set(tmp_path):
    assert steps_saved(tmp_path / "a", Clock(), 9, "checkpoint.every_minutes=4") == [4, 8]
    assert steps_saved(tmp_path / "b", Clock(), 25, "checkpoint.every=15") == [15]
    assert steps_saved(tmp_path / "c", Clock(), 25, "checkpoint.every=8", "checkpoint.every_minutes=5") == [
        *(5, 8, 13, 16, 21, 24),
    ]


def test_the_last_step_is_saved_unless_it_is_not_to_be_kept(tmp_path):
    def saved(name: str, *overrides: str, num_bytes: int = 0) -> list[int]:
        saver = Saver(loads("", ["checkpoint.background=false", *overrides]), tmp_path / name, num_steps=7)
        for step in range(1, 8):
            saver.after_step(step, Clock().parts(num_bytes), {}, Said())
        return CheckpointStore(tmp_path / name / "checkpoints").steps()

    assert saved("default") == [7]
    assert saved("by steps", "checkpoint.every=3") == [3, 6, 7]
    assert saved("dropped", "checkpoint.keep_final=false") == []
    assert saved("without state", "checkpoint.every=5", "checkpoint.save_state=false") == [5]
    # Where only the end asks for it, it must not cost the export its room.
    assert saved("full", "checkpoint.every=100", num_bytes=shutil.disk_usage(tmp_path).total) == []


def test_none_are_made_if_nobody_wants_any(tmp_path):
    saver = Saver(loads("checkpoint: {every_minutes: 0}"), tmp_path)
    assert not saver.can_save
    with pytest.raises(ConfigError, match="checkpoint.keep_last: has no effect: checkpoint.every is not set"):
        loads("checkpoint: {every_minutes: 0, keep_last: 2}")


def test_saving_by_default_takes_at_most_a_twentieth_of_the_time(tmp_path):
    """A save of 2 minutes: after the first, at step 10 in minute 10, the next comes 40 minutes after its end."""
    assert steps_saved(tmp_path / "unset", Clock(minutes_per_save=2.0), 60) == [10, 50]
    assert steps_saved(tmp_path / "set", Clock(minutes_per_save=2.0), 40, "checkpoint.every_minutes=10") == [
        *(10, 20, 30, 40),
    ]


def test_a_disk_that_is_too_small_is_warned_of_once_unless_checkpoints_were_asked_for(tmp_path):
    clock, said = Clock(), Said()
    saver = Saver(loads(""), tmp_path, clock=clock)
    too_much = shutil.disk_usage(tmp_path).total
    for step in range(1, 31):
        clock.minutes += 1
        saver.after_step(step, clock.parts(too_much), {}, said)
    [text] = said.texts
    assert text.startswith("no checkpoint is made: it takes ")
    assert "set checkpoint.path to a larger disk and checkpoint.every, or checkpoint.every_minutes to 0" in text
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("every", "made", "text"),
    [
        (1000, 0, "it made no step: start it again with the same command"),
        (1000, 1, "1 step is lost: there is no checkpoint to resume from (checkpoint.every=1 makes one"),
        (1000, 7, "7 steps are lost: there is no checkpoint to resume from (checkpoint.every=1 makes one"),
        (5, 5, f"nothing is lost but the step under way: the last checkpoint is of step 5. Resume with: {COMMAND}"),
        (5, 6, f"step 6 is lost: the last checkpoint is of step 5. Resume with: {COMMAND}"),
        (5, 9, f"steps 6 to 9 are lost: the last checkpoint is of step 5. Resume with: {COMMAND}"),
    ],
)
def test_an_interrupted_run_says_what_is_lost_and_how_to_resume(tmp_path, every, made, text):
    clock = Clock()
    saver = Saver(loads(f"checkpoint: {{every: {every}, background: false}}"), tmp_path, clock=clock)
    for step in range(1, made + 1):
        saver.after_step(step, clock.parts(), {}, Said())
    assert saver.ending(COMMAND).startswith(text)


def test_without_a_checkpoint_it_says_when_the_first_would_have_come(tmp_path):
    saver = Saver(loads(""), tmp_path)
    saver.made(3)
    assert "(the first would have come after 10 minutes; checkpoint.every=1 makes one" in saver.ending(COMMAND)


def test_after_a_resume_without_a_step_nothing_is_lost(tmp_path):
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    saver = Saver(loads(""), tmp_path)
    assert saver.ending(COMMAND).startswith("nothing is lost but the step under way: the last checkpoint is of step 4")


def test_a_signal_before_the_first_step_or_after_the_last_does_not_wait(tmp_path):
    saver = Saver(loads(""), tmp_path)
    assert saver.phase != "training"
    with saver.settled(SimpleNamespace(phase=lambda name: None)):
        assert saver.phase == "training"
    assert saver.phase != "training"


@pytest.mark.slow
def test_a_short_run_keeps_a_checkpoint_of_its_last_step_and_a_long_one_can_be_resumed(tmp_path):
    task = make_task(tmp_path)
    start(loads(sft_yaml(task)))
    assert CheckpointStore(task / "runs" / "sft" / "checkpoints").steps() == [8]
    often = "checkpoint.every_minutes=1e-6"
    start(loads(sft_yaml(task, name="often"), [often]))
    assert CheckpointStore(task / "runs" / "often" / "checkpoints").steps() == [6, 7, 8]


def test_a_run_that_is_extended_says_what_its_learning_rate_becomes(tmp_path):
    text = "{task: sft, actor: {model: m, optimizer: {schedule: cosine}}, data: {path: d}, checkpoint: {every: 1}}"
    saver = Saver(loads(text, ["checkpoint.background=false"]), tmp_path)
    saver.after_step(1, Clock().parts(), {}, Said())
    said = Said()
    longer = loads(text, ["train.max_epochs=4", "checkpoint.resume=true", "checkpoint.background=false"])
    with ExitStack() as stack:
        assert Saver(longer, tmp_path).find(stack, said.say).step == 1
    assert "learning rate: from the next step on that of the cosine schedule over the new number of steps" in said.texts
