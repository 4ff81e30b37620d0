"""For all tests: what one leaves in the environment is not found by the next in the same process; examples that
hypothesis makes may take their time, because others work on the same cores."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from environments import RAY_PRIORITY
from hypothesis import settings

from hotseat.openmp import wait_passively

wait_passively()  # before torch is loaded: the tests run two at a time, and threads that spin take each other's cores
os.environ.update(RAY_PRIORITY)

settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")

# Files of slow tests that take longest: with `--dist loadfile --no-loadscope-reorder` workers begin with them, so that
# the last files are small and none is waited for alone. Whole runs on Ray are between others: few start at once.
LARGE = (
    "reliability/test_kills.py",
    "train/test_train_zero.py",
    "train/test_train_fsdp.py",
    "reliability/test_overlap_kills.py",
    "loop/test_ppo.py",
    "train/test_train_tensor.py",
    "loop/test_vllm_runs.py",
    "loop/test_resume.py",
    "cluster/test_cluster_ray.py",
    "rollout/test_vllm_models.py",
    "rollout/test_vllm_adapters.py",
    "loop/test_overlap.py",
    "reliability/test_ray_dies.py",
    "train/test_train_compile.py",
    "cluster/test_cluster_endings.py",
    "reliability/test_rewards_and_updates.py",
    "loop/test_rl.py",
    "loop/test_launched.py",
    "loop/test_endings.py",
    "cluster/test_cluster_existing.py",
    "loop/test_reward_training.py",
    "cluster/test_cluster_doctor.py",
    "train/test_train_deepcompile.py",
    "reliability/test_disk.py",
    "reliability/test_whole_runs.py",
    "train/test_train_equality.py",
    "test_example_rlhf.py",
    "loop/test_background.py",
    "loop/test_reward_models.py",
    "reliability/test_trackers.py",
    "observe/test_report_page.py",
    "test_api.py",
    "cli/test_new.py",
    "loop/test_micro_batches.py",
)

MANY_FILES, NUM_SLOWEST = 30, 15  # when the slowest files are listed, and how many of them

# DeepSpeed reads the first from there, so its backend sets it; by it accelerate takes itself for one of several ranks.
LEFT_BEHIND = ("LOCAL_RANK", "DS_ACCELERATOR")


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A folder with a tiny model, its data and its reward function."""
    from loop_cases import make_task  # which loads torch

    return make_task(tmp_path)


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in LEFT_BEHIND}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {str(Path(__file__).parent / name): place for place, name in enumerate(LARGE)}
    items.sort(key=lambda item: places.get(str(item.path), len(LARGE)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """End a run of many files with those that took longest, so that the next slow one is seen."""
    seconds: Counter[str] = Counter()
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) < MANY_FILES:
        return
    terminalreporter.section(f"slowest files, of {sum(seconds.values()):.0f} s")
    for name, duration in seconds.most_common(NUM_SLOWEST):
        terminalreporter.line(f"{duration:6.1f} s  {name}")
