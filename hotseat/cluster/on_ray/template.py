"""Starts the template, from which processes of a run are forked instead of loading their libraries themselves.

    with started_template(["ray", "torch", "hotseat.loop.workers.model_workers"], env) as template:
        cluster = Cluster(template=template)

It is for a Ray cluster that is started here, on Linux. Elsewhere there is none, and every process loads what it needs.
CUDA does not survive a fork: a template in which a library has opened a GPU forks nothing.
The template is a program of its own (`template_process.py`), which loads the libraries while the driver loads its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

from hotseat.closing import on_failure
from hotseat.cluster.on_ray import forked, template_process
from hotseat.cluster.on_ray.library import AGENT_ENV, RAY_ENV
from hotseat.cluster.session import python_path

SWITCH = "HOTSEAT_TEMPLATE"  # 0 in the environment: no template

# One thread of OpenBLAS: its threads, which it starts when it is loaded, would not survive a fork.
_ENV = {"OPENBLAS_NUM_THREADS": "1", **RAY_ENV}
_FOR_WORKERS = ("ray", "ray._private.workers.default_worker")
_FOR_AGENTS = (
    "ray",
    "hotseat.cluster.on_ray.lean_agent",
    "ray._private.process_watcher",
    "ray._private.runtime_env.agent.runtime_env_agent",
)


class Template:
    """Two processes that fork others: one has loaded the workers' libraries, one what the agents of Ray's raylet need.

    for_workers, for_agents: the arguments of python that have a script run as a fork.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]):
        """Start both. modules: what workers import; env: variables that libraries read while they are loaded."""
        self._directory = tempfile.mkdtemp(prefix="hotseat-")
        self._processes: list[subprocess.Popen[bytes]] = []
        with on_failure(self.close):
            self._start("agents", _FOR_AGENTS, (), AGENT_ENV)
            self._start("workers", modules, _FOR_WORKERS, env)
            self.for_agents, self.for_workers = self._prefix("agents"), self._prefix("workers")

    @property
    def pids(self) -> list[int]:
        """List the template of agents, then that of workers."""
        return [process.pid for process in self._processes]

    def _address(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _prefix(self, name: str) -> tuple[str, ...]:
        return "-I", "-S", os.path.abspath(forked.__file__), self._address(name)

    def _start(self, name: str, modules: Sequence[str], late: Sequence[str], env: Mapping[str, str]) -> None:
        program = os.path.abspath(template_process.__file__)
        process = subprocess.Popen(
            [sys.executable, "-P", program, self._address(name), *modules, "--", *late],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **env, **_ENV, "PYTHONPATH": python_path()},
            process_group=0,  # Ctrl-C in the terminal is for the driver
        )
        self._processes.append(process)

    def close(self) -> None:
        """End the template. Its forks live on: whoever started them ends them."""
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def can_fork() -> bool:
    """Tell whether processes can be forked from a template on this machine."""
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open") or os.environ.get(SWITCH) == "0":
        return False
    return not os.environ.get("RAY_ADDRESS")


_ahead: tuple[Sequence[str], Mapping[str, str], Template] | None = None  # started before it was asked for


def start_ahead(modules: Sequence[str], env: Mapping[str, str]) -> Callable[[], object]:
    """Start the template that `started_template` will be asked for with these arguments; return what ends it."""
    global _ahead
    if not can_fork():
        return lambda: None
    template = Template(modules, env)
    _ahead = modules, env, template
    return template.close


def _taken_ahead(modules: Sequence[str], env: Mapping[str, str]) -> Template | None:
    global _ahead
    ahead, _ahead = _ahead, None
    if ahead is None or ahead[:2] == (modules, env):
        return None if ahead is None else ahead[2]
    ahead[2].close()  # the config has changed
    return None


@contextlib.contextmanager
def started_template(
    modules: Sequence[str],
    env: Mapping[str, str],
    is_useful: bool = True,
) -> Iterator[Template | None]:
    """Start a template that loads these modules; None if it is of no use, or processes cannot be forked here.

    env: variables that libraries read when they are loaded, set as in the processes to be forked.
    """
    if not is_useful or not can_fork():
        yield None
        return
    template = _taken_ahead(modules, env) or Template(modules, env)
    try:
        yield template
    finally:
        template.close()
