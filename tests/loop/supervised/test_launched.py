"""Checkpoints of ranks that a launcher started: they save and go on together, and none is left waiting."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import preloaded
import pytest
from loop_cases import make_task, same, sft_yaml, weights
from paused_runs import arm, end_stopped, wait_until_stopped
from rank_cases import meeting

from hotseat.config import load, loads
from hotseat.errors import RunError, UserError
from hotseat.faults import VARIABLE, Fault
from hotseat.loop.run import start
from hotseat.loop.state.checkpoints import CheckpointStore
from hotseat.loop.state.saving import CheckpointSource, Saver
from hotseat.loop.supervised.launched import LaunchedRanks
from hotseat.observe import NullJournal, read_lines

HAS_MOUNTS = bool(shutil.which("unshare")) and not subprocess.run(["unshare", "-rm", "true"]).returncode

RANK = """
import sys
from hotseat.config import load
from hotseat.errors import HotseatError
from hotseat.loop.run import start

try:
    start(load(sys.argv[1], sys.argv[2:]), launched=True)
except HotseatError as error:
    print(type(error).__name__, error, *getattr(error, "__notes__", ()), file=sys.stderr)
    sys.exit(1)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def task(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    return make_task(tmp_path)


@contextmanager
def started_ranks(
    task: Path, name: str, *overrides: str, faults: dict[int, Fault] | None = None, prefix: tuple[str, ...] = ()
) -> Iterator[list[preloaded.Process]]:
    """Two ranks, as a launcher starts them. Each has faults of its own. prefix: of the second rank's command."""
    (task / f"{name}.yaml").write_text(sft_yaml(task, name=name))
    command = [sys.executable, str(task / "rank.py"), str(task / f"{name}.yaml"), *overrides]
    processes: list[preloaded.Process] = []
    with meeting(2) as environments:
        try:
            for rank, own in enumerate(environments):
                directory = task / f"faults-{time.monotonic_ns()}"
                arm(directory, [faults[rank]] if faults and rank in faults else [])
                env = {**os.environ, **own, "LOCAL_RANK": str(rank), VARIABLE: str(directory)}
                own_command, popen = command, preloaded.popen
                if prefix and rank == 1:
                    own_command, popen = [*prefix, *command], subprocess.Popen
                processes.append(popen(own_command, env=env, stdout=preloaded.PIPE, stderr=preloaded.PIPE, text=True))
            yield processes
        finally:
            for process in processes:
                process.kill()


def finish(processes: list[preloaded.Process]) -> list[tuple[int, str, str]]:
    """(exit code, what it printed, what it complained of) of each rank: ranks that are left waiting do for longer."""
    deadline = time.monotonic() + 240
    told = [process.communicate(timeout=max(0.1, deadline - time.monotonic())) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, told, strict=True)]


def launch(task: Path, name: str, *overrides: str, faults: dict[int, Fault] | None = None):
    with started_ranks(task, name, *overrides, faults=faults) as processes:
        return finish(processes)


def losses(task: Path, name: str) -> list:
    return [
        (line["step"], line.get("loss"), line.get("eval/loss"))
        for line in read_lines(task / "runs" / name / "metrics.jsonl")
    ]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_launched_ranks_resume_bit_for_bit(task):
    """Invariant 5 with two ranks, one of which is killed; then there is nothing left to do."""
    assert [code for code, *_ in launch(task, "whole")] == [0, 0]
    saving = ("checkpoint.every=2", "checkpoint.export_each=true")
    (first, _, error), (second, *_) = launch(
        task, "broken", *saving, faults={1: Fault("update.middle", "kill", skip=4)}
    )
    assert (first, second) == (1, -signal.SIGKILL)
    assert "resume after step 4: start it again with checkpoint.resume=true" in error
    newest = CheckpointStore(task / "runs" / "broken" / "checkpoints").newest()
    assert (newest.step, newest.state["num_ranks"]) == (4, 2)
    assert (newest.path / "model" / "model.safetensors").is_file()
    (code, out, error), (second, silent, _) = launch(task, "broken", *saving, "checkpoint.resume=true")
    assert (code, second, silent) == (0, 0, ""), error
    assert f"resuming from {newest.path}, after step 4" in out
    assert same(weights(task, "whole"), weights(task, "broken"))
    assert losses(task, "whole") == losses(task, "broken")
    (code, out, _), (second, *_) = launch(task, "broken", *saving, "checkpoint.resume=true")
    assert (code, second) == (0, 0)
    assert "nothing to do: all 8 steps are done" in out


@pytest.mark.slow
@pytest.mark.parametrize("point", [pytest.param("save.before", marks=pytest.mark.long), "save.commit"])
def test_an_error_of_the_first_rank_is_raised_on_all(task, point):
    found = launch(task, "run", "checkpoint.every=2", faults={0: Fault(point, "raise", skip=1)})
    for code, _, error in found:
        assert code == 1
        assert f"RunError a fault at {point}" in error
    assert CheckpointStore(task / "runs" / "run" / "checkpoints").newest().step == 2


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_that_runs_out_of_memory_writes_the_smaller_budget_for_all(task):
    """Whichever it is: the others only see it go. Started again, all of them use that budget."""
    chosen = "train={dtype: fp32, batch_size: 4, max_epochs: 4, chosen_tokens_per_device: 64}"
    faults = {1: Fault("update.forward", "out-of-memory", skip=2)}
    (first, *_), (second, _, error) = launch(task, "run", chosen, "checkpoint.every=1", faults=faults)
    assert (first, second) == (1, 1)
    assert "BudgetError" in error
    kept = load(task / "runs" / "run" / "config.yaml").train.chosen_tokens_per_device
    assert kept < 64
    auto = "train={dtype: fp32, batch_size: 4, max_epochs: 4}"
    (code, out, error), (second, *_) = launch(task, "run", auto, "checkpoint.every=1", "checkpoint.resume=true")
    assert (code, second) == (0, 0), error
    assert f"train.chosen_tokens_per_device: 64 when the checkpoint was written, now {kept}" in out
    assert load(task / "runs" / "run" / "config.yaml").train.chosen_tokens_per_device == kept


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_that_cannot_write_ends_all(task, rank):
    found = launch(task, "run", "checkpoint.every=2", faults={rank: Fault("save.during", "raise", skip=1)})
    assert all(code not in (0, -signal.SIGKILL) for code, *_ in found)
    assert "RunError a fault at save.during" in found[rank][2]
    assert CheckpointStore(task / "runs" / "run" / "checkpoints").newest().step == 2


@pytest.mark.slow
def test_a_directory_that_is_taken_is_refused_by_all(task):
    (task / "runs" / "run").mkdir(parents=True)
    (task / "runs" / "run" / "config.yaml").touch()
    (task / "runs" / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    for code, _, error in launch(task, "run", "checkpoint.every=2"):
        assert code == 1
        assert f"UserError {task}/runs/run holds a run already" in error


@pytest.mark.slow
def test_sigterm_to_one_rank_saves_and_ends_all(task):
    stop = Fault("update.middle", "stop", skip=2)
    with started_ranks(task, "run", "checkpoint.every=1000", faults={1: stop}) as processes:
        wait_until_stopped(processes[1], processes[0])
        end_stopped(processes[1])
        (first, out, _), (second, *_) = finish(processes)
    assert (first, second) == (130, 130)
    assert "saved " in out
    last = read_lines(task / "runs" / "run" / "metrics.jsonl")[-1]["step"]
    assert CheckpointStore(task / "runs" / "run" / "checkpoints").newest().step == last


@pytest.mark.slow
def test_one_rank_alone_saves_too(task, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    start(loads(sft_yaml(task, name="run"), ["checkpoint.every=4"]), launched=True)
    assert CheckpointStore(task / "runs" / "run" / "checkpoints").steps() == [4, 8]


@pytest.mark.slow
def test_writing_in_the_background_is_refused_rather_than_ignored(task):
    with pytest.raises(UserError, match="checkpoint.background is true, but ranks that a launcher started wait"):
        start(loads(sft_yaml(task), ["checkpoint.every=2", "checkpoint.background=true"]), launched=True)
    with pytest.raises(UserError, match="ranks that a launcher started are not started again, so they make no memory"):
        start(loads(sft_yaml(task), ["checkpoint.every=2", "checkpoint.memory_every=1"]), launched=True)


class Steps:
    """The first of two ranks, the second of which was told to stop."""

    def step(self):
        return "first"

    def share(self, fact, what):
        return [fact, ("second", True) if what == "end 'step'" else None]


def test_the_first_rank_hears_that_another_was_told_to_stop():
    ranks = LaunchedRanks(Steps(), 0, 2, 60.0)
    assert not ranks.must_stop
    assert ranks.call(Steps.step) == ["first", "second"]
    assert ranks.must_stop
    assert ranks.on(0).call(Steps.step) == ["first"]


@pytest.mark.parametrize(
    ("every", "told_at", "ends_after"),
    [
        (1000, 1, 1),
        (1000, 2, 2),
        (1, 2, 1),  # while it saves anyway
        (1, 3, 2),  # the checkpoint is there, and the run goes on
    ],
)
def test_a_signal_to_another_rank_saves_and_ends_the_run(tmp_path, every, told_at, ends_after):
    saver = Saver(loads("", [f"checkpoint.every={every}"]), tmp_path)
    parts = CheckpointSource(lambda: 0, lambda path: (path / "actor").mkdir(), lambda path: path.mkdir(), dict)
    asked = iter(range(1, 10))
    must_stop = lambda: next(asked) >= told_at  # noqa: E731
    for step in range(1, ends_after):
        saver.after_step(step, parts, {}, NullJournal(), must_stop)
    with pytest.raises(KeyboardInterrupt):
        saver.after_step(ends_after, parts, {}, NullJournal(), must_stop)
    assert CheckpointStore(tmp_path / "checkpoints").newest().step == ends_after


def test_an_error_that_is_nobodys_mistake_travels_as_text():
    told = []

    class Alone:
        def share(self, fact, what):
            told.append(fact)
            return [fact]

    def divide() -> float:
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        LaunchedRanks(Alone(), 0, 1, 60.0).led(divide)
    [(kind, error)] = told
    assert (kind, type(error), str(error)) == (
        "error",
        RunError,
        "the first rank failed: ZeroDivisionError: division by zero",
    )


def test_launched_ranks_need_a_number_of_layers_that_recompute(task):
    overrides = ["train.gradient_checkpointing=true", "train.checkpointed_layers=auto"]
    with pytest.raises(UserError, match="before they could agree on a number: set one"):
        start(loads(sft_yaml(task), overrides), launched=True)


def test_a_run_that_leaves_the_layers_to_itself_recomputes_all_on_cpus(task, capsys):
    overrides = ["train.gradient_checkpointing=true", "train.checkpointed_layers=auto"]
    (task / "run.yaml").write_text(sft_yaml(task))
    start(load(task / "run.yaml", overrides))
    assert "train.checkpointed_layers: all" in capsys.readouterr().out
    [kept] = (task / "runs").glob("*/config.yaml")
    assert load(kept).train.checkpointed_layers is None


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not HAS_MOUNTS, reason="needs `unshare -rm`")
def test_a_launched_rank_on_another_mount_is_named_before_it_loads_a_model(task):
    """Scenario 64: a disk of its own under the same path, as on nodes that share nothing."""
    (task / "runs").mkdir()
    prefix = ("unshare", "-rm", "sh", "-c", f'mount -t tmpfs none {task}/runs && exec "$0" "$@"')
    with started_ranks(task, "run", "cluster.call_timeout_s=20", prefix=prefix) as processes:
        [(code, _, complaint)] = finish([processes[1]])
        processes[0].kill()
    assert code == 1
    told = f"actor rank 1 on {socket.gethostname()} does not see the folder {task}/runs in which this run makes its"
    assert told in complaint
    assert "put run_dir, or checkpoint.path, on a disk that all nodes share" in complaint
    assert not (task / "runs" / "run").exists()
