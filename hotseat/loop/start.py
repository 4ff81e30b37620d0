"""First part of a run, before heavy imports: checks the config, shows progress, loads libraries, calls `loop.run`.

Meanwhile a process called the template loads the libraries of workers, which are forked from it where that is possible.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console

from hotseat import interrupts
from hotseat.caches import keep_compiled
from hotseat.checks.agent_trial import agent_trial
from hotseat.checks.pipeline import check_config, check_user_code
from hotseat.closing import on_failure
from hotseat.cluster import start_ahead, started_template
from hotseat.cluster.environment import COPIES
from hotseat.config import Config
from hotseat.loop.steering import Steering
from hotseat.model_source import NUMERIC
from hotseat.observe import LiveView
from hotseat.observe.noise import without_deepspeeds_greeting
from hotseat.openmp import thread_env, wait_passively
from hotseat.processes import kept_driver
from hotseat.registry.backends import backend_entry

_RL_MODULES = ("hotseat.loop.rl.auto_placement", "hotseat.loop.rl.assemble", "hotseat.loop.rl.launch")


def start(config: Config, launched: bool = False, steering: Steering | None = None) -> dict[str, float]:
    """Run a config to its end: check it, load heavy libraries, and call `hotseat.loop.run.start`.

    launched: this process is one rank of several that a launcher such as torchrun started. steering: of a script.
    Returns the last evaluation.
    """
    with interrupts.handled() as handler, handler.in_run():
        check_config(config)
        keep_compiled()
        shown = None if steering is None else steering.view(config.task)
        # The user's code has passed its trial when the first driver of the command began.
        is_again = bool(kept_driver.restarts)
        with (
            shown or make_view(config, launched) as view,
            nullcontext() if is_again else agent_trial(config) as trial,
        ):
            notes = check_job_directory(config, Path.cwd())
            if not is_again:
                notes += check_user_code(config, view.stage)
            view.stage("loading torch and transformers")
            has_workers = not launched and not config.cluster.is_in_process
            env = thread_env(config.cluster.threads_per_process)
            modules = worker_modules(config)
            with without_deepspeeds_greeting(), started_template(modules, env, has_workers) as template:
                with without_collector():
                    from hotseat.loop import run

                handler.check()
                if trial is not None:
                    view.stage(f"loading {config.agent.path} once, to see that it works")
                    notes += trial.notes()
                return run.start(config, launched, view, notes, template, steering=steering)


def prepare_driver(run_dir: Path) -> Callable[[], object]:
    """Load what the next driver of a run needs, and start its template, before it begins; return what ends that."""
    from hotseat.loop.state.run_dir import kept_config

    config = kept_config(run_dir)
    assert config is not None
    wait_passively()
    keep_compiled()
    modules = ["hotseat.cli.main", "hotseat.loop.run", *(_RL_MODULES if config.has_rollouts else ())]
    end: Callable[[], object] = str
    if not config.cluster.is_in_process:
        modules.append("ray")
        end = start_ahead(worker_modules(config), thread_env(config.cluster.threads_per_process))
    with on_failure(end), without_deepspeeds_greeting(), without_collector():
        for module in modules:
            importlib.import_module(module)
    return end


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable garbage collection inside the context, which takes a seventh of the time of imports and frees nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def worker_modules(config: Config) -> list[str]:
    """List what the workers of a run import, in the order in which a template loads it."""
    modules = ["torch", "transformers", "hotseat.loop.workers.model_workers"]
    if config.has_rollouts:
        modules += ["hotseat.loop.workers.rollout_host", "hotseat.loop.workers.value_models"]
    else:
        modules.append("hotseat.loop.supervised.supervised_worker")
    package = backend_entry(config.train.backend).package
    if package is not None and not Path("/dev/nvidiactl").exists():  # DeepSpeed starts CUDA when it is loaded
        modules.append(package)
    for model in {config.actor.model, config.critic.model, config.reference.model, config.reward.model}:
        family = _family(model)
        if family == NUMERIC:
            modules.append("hotseat.numeric.models")
        elif family is not None:
            modules.append(f"transformers.models.{family}.modeling_{family}")
    return [*modules, "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"]


def _family(model: str | None) -> str | None:
    try:
        family = json.loads((Path(model or "") / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return family if isinstance(family, str) and family.isidentifier() else None


def make_view(config: Config, launched: bool) -> LiveView:
    """Make the live view of a run; of ranks that a launcher started, only the first shows anything."""
    is_shown = not launched or os.environ.get("RANK", "0") == "0"
    return LiveView(config.task, console=Console(quiet=not is_shown))


def check_job_directory(config: Config, directory: Path) -> list[str]:
    """Return a note if files of the run would go into Ray's copy of a job's working directory, which Ray deletes.

    directory: the current one, from which relative paths start.
    """
    if f"/{COPIES}/" not in f"{directory}/":
        return []
    paths = {
        "run_dir": config.run_dir,
        "checkpoint.path": config.checkpoint.folder,
        "checkpoint.export_path": config.checkpoint.export_path,
    }
    here = directory.resolve()
    inside = [f"{key} {path}" for key, path in paths.items() if path and (here / path).resolve().is_relative_to(here)]
    if not inside:
        return []
    return [
        f"{', '.join(inside)}: relative to {directory}, Ray's copy of the job's working directory, which Ray may delete"
        " once the job has ended; give absolute paths to keep them"
    ]
