"""For all tests: what one leaves in the environment is not found by the next in the same process; examples that
hypothesis makes may take their time, because others work on the same cores, and are new only beside long tests."""

from __future__ import annotations

import atexit
import compileall
import contextlib
import gc
import itertools
import multiprocessing
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import preloaded
import pytest
from _pytest.mark.expression import Expression
from environments import RAY_PRIORITY
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from hotseat.observe.metric_files import JsonLines
from hotseat.openmp import wait_passively
from hotseat.registry.metric_names import entry_of

wait_passively()  # before torch is loaded: the tests run two at a time, and threads that spin take each other's cores
os.environ.update(RAY_PRIORITY)

settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeated", settings.get_profile("patient"), derandomize=True, database=None)
settings.load_profile("patient")

# Files of slow tests that take longest, longest first: with `--dist loadfile --no-loadscope-reorder` workers begin with
# them, so that the last files are small and none is waited for alone.
LARGE = (
    "train/test_zero.py",
    "train/test_fsdp.py",
    "runs/test_overlap.py",
    "runs/test_vllm_runs.py",
    "runs/test_overlap_kills.py",
    "observe/report/test_page_in_browser.py",
    "runs/test_resume.py",
    "rollout/test_transformers_engine.py",
    "runs/test_rl.py",
    "cluster/on_ray/test_ray_group.py",
    "runs/test_endings.py",
    "rollout/test_fused_weights.py",
    "runs/test_simulator_runs.py",
    "cluster/on_ray/test_connection.py",
    "runs/test_ppo.py",
    "runs/test_rewards_and_updates.py",
    "loop/rl/test_components.py",
    "runs/test_kills.py",
    "runs/test_resume_refusals.py",
    "runs/test_black_box_runs.py",
    "runs/test_frame_runs.py",
    "runs/test_ray_dies.py",
    "loop/workers/test_preferences.py",
    "examples/test_python_examples.py",
    "runs/test_image_runs.py",
    "train/test_vlm_models.py",
    "train/test_compile.py",
    "loop/supervised/test_launched.py",
    "runs/test_replay.py",
    "train/test_image_ranks.py",
    "rewards/test_function.py",
    "runs/test_background_saving.py",
    "rollout/test_llama_kernels.py",
    "train/test_tensor.py",
    "planning/test_advisor.py",
    "verl/test_verl_keys.py",
    "runs/test_families.py",
    "runs/test_whole_runs.py",
    "rlinf/test_rlinf_cluster.py",
    "examples/test_rlhf_pipeline.py",
    "runs/test_supervised.py",
    "loop/workers/test_value_models.py",
    "cluster/on_ray/test_launching.py",
    "trl/test_from_trl.py",
    "runs/test_adapters.py",
    "cli_openrlhf/test_helpers.py",
    "rewards/test_graders.py",
    "agents/test_programs.py",
    "runs/test_judge_runs.py",
    "cluster/test_doctor.py",
    "runs/test_tracker_runs.py",
    "runs/test_teachers.py",
    "train/test_muon.py",
    "loop/serving/test_reward_server.py",
    "train/test_deepcompile.py",
    "runs/test_disk.py",
    "loop/rl/test_auto_placement.py",
    "cli/test_new.py",
    "cluster/on_ray/test_dashboard.py",
    "runs/test_offline.py",
    "runs/test_wheel.py",
    "examples/test_single_file.py",
    "test_api.py",
    "planning/test_budgets.py",
    "agents/test_black_box.py",
    "train/test_equality.py",
    "rollout/test_vllm_adapters.py",
    "runs/test_vllm_adapter_runs.py",
    "test_user_functions.py",
    "runs/test_reward_training.py",
    "trl/test_trl_runs.py",
    "runs/test_dying_engines.py",
    "test_retry.py",
)

# Files that load vLLM, which takes a worker ten seconds: one worker runs them all.
OF_VLLM = (
    "rollout/test_vllm_images.py",
    "rollout/test_vllm_image_adapters.py",
    "rollout/test_vllm_adapters.py",
    "rollout/test_vllm_engine.py",
    "rollout/test_vllm_fp8.py",
    "rollout/test_vllm_latent.py",
    "rollout/test_fused_weights.py",
    "runs/test_vllm_runs.py",
)

MARK = re.compile(r"pytest\.mark\.(slow|long|ray|gpu)\b")

MANY_FILES, NUM_SLOWEST = 30, 15  # when the slowest files are listed, and how many of them

# DeepSpeed reads the first from there, so its backend sets it; by it accelerate takes itself for one of several ranks.
LEFT_BEHIND = ("LOCAL_RANK", "DS_ACCELERATOR")


CALLBACKS = "mine/"  # what callbacks of tests add to the metrics of a run


@pytest.fixture(autouse=True, scope="session")
def _metrics_have_entries() -> Iterator[None]:
    """Every metric that a run in this process writes has an entry in the table that the docs are made from."""
    write = JsonLines.write

    def checked(self: JsonLines, record: Any) -> None:
        if Path(self._file.name).name == "metrics.jsonl":
            assert not [name for name in record if entry_of(name) is None and not name.startswith(CALLBACKS)]
        write(self, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JsonLines, "write", checked)
        yield


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


@pytest.fixture(autouse=True)
def _products_as_before() -> Iterator[None]:
    """Switch oneDNN on again: on ARM CPUs without units for bf16, torch's first product in bf16 switches it off."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch._C._set_mkldnn_enabled(True)


def pytest_configure(config: pytest.Config) -> None:
    """Have hypothesis try the same examples each time, and new ones only where long tests run, too."""
    expression = config.option.markexpr
    if expression and not Expression.compile(expression).evaluate({"long"}.__contains__):
        settings.load_profile("repeated")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files in which `-m` chooses no test: importing them takes longer than reading their marks."""
    expression = config.option.markexpr
    if not expression or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return None if may_be_chosen(collection_path.read_text(), expression) else True


def may_be_chosen(source: str, expression: str) -> bool:
    """Tell whether some test of a file can have marks that fit: all of the module's, and any that it mentions."""
    of_module = re.search(r"^pytestmark = (\[.*?^\]|.*?$)", source, re.DOTALL | re.MULTILINE)
    of_all = set(MARK.findall(of_module[0])) if of_module else set()
    of_some = sorted(set(MARK.findall(source)) - of_all)
    fits = Expression.compile(expression)
    possible = (
        of_all.union(some) for count in range(len(of_some) + 1) for some in itertools.combinations(of_some, count)
    )
    return any(fits.evaluate(marks.__contains__) for marks in possible)


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the workers off one process, which imports torch and transformers for all of them.

    While it does, another process writes the bytecode of the test files, which all workers would make at the same time.
    """
    if not sys.dont_write_bytecode:
        multiprocessing.get_context("fork").Process(target=compile_files, args=(config,), daemon=True).start()
    if preloaded.has_devices():
        return
    os.environ[preloaded.ADDRESS] = preloaded.start_server()
    for spec in specs:
        spec.python = shlex.join([sys.executable, preloaded.__file__])


class FilesOfVllmTogether(LoadFileScheduling):
    """Gives a worker a file at a time, or all that load vLLM."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "vllm" if file.endswith(OF_VLLM) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return FilesOfVllmTogether(config, log) if config.getvalue("dist") == "loadfile" else None


class NotRun(Exception):
    pass


class Unrun:
    """A module that pytest compiles, with its assertions rewritten, and then cannot run: that takes its `__dict__`."""

    def __init__(self, path: Path):
        self.__name__ = path.stem
        self.__spec__ = SimpleNamespace(origin=str(path))

    @property
    def __dict__(self) -> dict[str, Any]:
        raise NotRun


def compile_files(config: pytest.Config) -> None:
    """Have the bytecode of this project and of all tests that `-m` may choose written."""
    compileall.compile_dir(Path(__file__).parents[1] / "hotseat", quiet=2)
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        if not pytest_ignore_collect(path, config):
            with contextlib.suppress(NotRun, SyntaxError):  # workers report what cannot be compiled
                config.pluginmanager.rewrite_hook.exec_module(Unrun(path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import without looking for garbage: modules stay, and no test looks through them again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # or libraries complain at the end about what was not freed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {str(Path(__file__).parent / name): place for place, name in enumerate(LARGE)}
    items.sort(key=lambda item: places.get(str(item.path), len(LARGE)))


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(item.get_closest_marker("ray") for item in session.items):
        preloaded.fork_templates()


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
