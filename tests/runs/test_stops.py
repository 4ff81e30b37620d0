"""Ctrl-C and SIGTERM at every moment of a run: a message, exit code 130, and nothing half done."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import preloaded
import pytest
from loop_cases import make_task, rl_yaml
from paused_runs import arm, wait_until_stopped

from hotseat.faults import VARIABLE, Fault

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
AT_ONCE = "hotseat: {name}: the run ends; one more ends it without closing what it started"
WAITS = "hotseat: {name}: {what}, then the run ends; a second one ends it at once"
ON_RAY = "{component_placement: {actor: 0, rollout: '@actor'}}"
LOCAL = "{runtime: local}"


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return make_task(tmp_path)


@contextmanager
def running(task: Path, *faults: Fault, cluster: str = LOCAL, overrides: tuple[str, ...] = ()) -> Iterator:
    """A run of two steps in a process group of its own, as a shell starts it, with these faults."""
    arm(task / "faults", faults)
    (task / "run.yaml").write_text(rl_yaml(task, name="run", cluster=cluster))
    options = ("train.num_episodes=1", "checkpoint.every=1000", *overrides)
    with preloaded.popen(
        [sys.executable, "-m", "hotseat.cli.main", "run", str(task / "run.yaml"), *options],
        env={**os.environ, VARIABLE: str(task / "faults")},
        stdout=preloaded.PIPE,
        stderr=preloaded.PIPE,
        text=True,
        process_group=0,
    ) as driver:
        try:
            yield driver
        finally:
            driver.kill()


def send_to_group(driver: preloaded.Process, number: signal.Signals) -> None:
    """Send a signal to everybody in the group of a stopped process, as a terminal does, and let it continue."""
    os.killpg(driver.pid, number)
    driver.send_signal(signal.SIGCONT)


def stopped_at(task: Path, point: str, number: signal.Signals, **options) -> tuple[int, str, list[str]]:
    """Return exit code, output and lines of standard error of a run that gets a signal at a point."""
    with running(task, Fault(point, "stop"), **options) as driver:
        wait_until_stopped(driver)
        send_to_group(driver, number)
        out, errors = driver.communicate(timeout=860)
    assert "Traceback" not in errors
    return driver.returncode, out, errors.strip().splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)], ids=NAMES.get)
def test_before_the_first_step_a_run_ends_at_once(task, number):
    code, _, errors = stopped_at(task, "inputs", number)
    assert code == 130
    assert errors[-3:] == [
        AT_ONCE.format(name=NAMES[number]),
        "hotseat: stopped",
        "no run had begun: start it again with the same command",
    ]
    assert not (task / "runs" / "run").exists()


def test_the_first_ctrl_c_lets_the_step_finish_as_sigterm_does(task):
    code, out, errors = stopped_at(task, "update.before", signal.SIGINT)
    assert code == 130
    assert "saved " in out
    assert errors == [
        WAITS.format(name="Ctrl-C", what="this step is finished and saved"),
        "hotseat: stopped",
        f"nothing is lost: the last checkpoint is of step 1. Resume with: hotseat resume {task}/runs/run",
    ]
    assert [path.name for path in (task / "runs" / "run" / "checkpoints").glob("step-*")] == ["step-000001"]


def test_a_signal_during_the_export_lets_it_finish(task):
    code, out, errors = stopped_at(task, "export", signal.SIGTERM)
    assert code == 130
    assert "model: " in out
    assert errors == [
        WAITS.format(name="SIGTERM", what="the model is exported"),
        "hotseat: stopped",
        "nothing is lost: the run is finished, and its model is exported",
    ]
    assert (task / "runs" / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS, ids=NAMES.get)
@pytest.mark.parametrize("background", ["false", "true"])
@pytest.mark.parametrize("point", ["save.before", "save.during", "save.commit", "save.after"])
def test_a_signal_during_a_checkpoint_lets_it_complete(task, point, background, number):
    options = ("checkpoint.every=1", f"checkpoint.background={background}")
    code, _, errors = stopped_at(task, point, number, overrides=options)
    assert code == 130
    assert errors[0] == WAITS.format(name=NAMES[number], what="this step is finished and saved")
    assert re.match(r"nothing is lost: the last checkpoint is of step [12]\.", errors[-1])
    assert not list((task / "runs" / "run" / "checkpoints").glob(".*"))


@pytest.mark.long
@pytest.mark.parametrize("background", ["false", "true"])
@pytest.mark.parametrize(("point", "steps"), [("save.during", []), ("save.commit", []), ("save.after", [1])])
def test_a_second_signal_during_a_checkpoint_leaves_a_whole_one_or_none(task, point, background, steps):
    """The first comes in the step before, so that its checkpoint is under way when the second comes."""
    faults = Fault("update.before", "stop"), Fault(point, "stop")
    options = (f"checkpoint.background={background}",)
    with running(task, *faults, overrides=options) as driver:
        wait_until_stopped(driver)
        send_to_group(driver, signal.SIGINT)
        wait_until_stopped(driver)
        send_to_group(driver, signal.SIGINT)
        _, errors = driver.communicate(timeout=860)
    assert driver.returncode == 130
    assert "Traceback" not in errors
    checkpoints = sorted(path.name for path in (task / "runs" / "run" / "checkpoints").glob("step-*"))
    assert checkpoints == [f"step-{step:06}" for step in steps]


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS, ids=NAMES.get)
@pytest.mark.parametrize("point", ["inputs", "ray", "start-up", "closing"])
def test_on_ray_a_signal_outside_of_the_steps_ends_the_run(task, point, number):
    code, _, errors = stopped_at(task, point, number, cluster=ON_RAY)
    assert code == 130
    assert AT_ONCE.format(name=NAMES[number]) in errors
    assert errors[-2] == "hotseat: stopped"
