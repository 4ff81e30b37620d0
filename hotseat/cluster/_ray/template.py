"""Starts the template, from which processes of a run are forked instead of loading their libraries themselves.

    with started_template(["ray", "torch", "hotseat.loop.workers.models"], env) as template:
        cluster = Cluster(template=template)

It is for a Ray cluster that is started here, on Linux, on machines without NVIDIA devices: CUDA does not survive a
fork, and some libraries look for devices while they are loaded. Elsewhere there is none, and every process loads what
it needs. See `template_process.py`. A command that has just begun loads the libraries itself and forks the template, so
that they are loaded once; another driver starts it as a program, which loads them at the same time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from hotseat.cluster._ray import forked, template_process
from hotseat.cluster._ray.library import AGENT_ENV, RAY_ENV
from hotseat.cluster._ray.template_fork import Fork, fork_template, open_files
from hotseat.cluster.environment import environment_of_its_own
from hotseat.cluster.session import python_path

SWITCH = "HOTSEAT_TEMPLATE"  # 0 in the environment: no template
_ENDING_S = 2.0  # within which a thread that was stopped ends

# One thread of OpenBLAS: its threads, which it starts when it is loaded, would not survive a fork.
_ENV = {"OPENBLAS_NUM_THREADS": "1", **RAY_ENV}
_FOR_WORKERS = ("ray", "ray._private.workers.default_worker")
_FOR_AGENTS = (
    "ray",
    "hotseat.cluster._ray.lean_agent",
    "ray._private.process_watcher",
    "ray._private.runtime_env.agent.runtime_env_agent",
)


class Template:
    """Two processes that fork others: one has loaded the workers' libraries, one what the agents of Ray's raylet need.

    for_workers, for_agents: the arguments of python that have a script run as a fork.
    """

    def __init__(
        self,
        modules: Sequence[str],
        env: Mapping[str, str],
        alone: Callable[[], AbstractContextManager[object]] | None = None,
    ):
        """Start both. alone: makes a context in which the threads of this command end; None: this is no command."""
        self._directory = tempfile.mkdtemp(prefix="hotseat-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._fork: Fork | None = None
        try:
            self._start("agents", _FOR_AGENTS, (), AGENT_ENV)
            if alone is not None and _may_be_forked_later():
                files = open_files()
                with environment_of_its_own({**env, **_ENV}):
                    template_process.load(modules)
                with alone():
                    self._fork_here(env, files)
                # As it would have been. Not before the fork: torch starts a thread.
                template_process.set_threads(os.environ.get("OMP_NUM_THREADS"))
            if self._fork is None:
                self._start("workers", modules, _FOR_WORKERS, env)
            self.for_agents, self.for_workers = self._prefix("agents"), self._prefix("workers")
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """List the template of agents, then that of workers."""
        pids = [process.pid for process in self._processes]
        return pids if self._fork is None else [*pids, self._fork.pid]

    def _fork_here(self, env: Mapping[str, str], files: Sequence[int]) -> None:
        """Fork the template of workers from this process if that is safe."""
        if not _is_forkable_soon():
            return
        not_of_workers = ("", sysconfig.get_path("scripts"))  # the folder of a program is first on its path
        own = dict.fromkeys([*python_path().split(os.pathsep), *sys.path])
        path = [each for each in own if each not in not_of_workers]
        self._fork = fork_template(self._address("workers"), _FOR_WORKERS, path, {**env, **_ENV}, files)

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
        if self._fork is not None:
            self._fork.close()
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _may_be_forked_later() -> bool:
    """Tell whether this process can be forked once it has loaded the libraries, as far as that is known before."""
    if "torch" in sys.modules or None in (sys.stdin, sys.stdout, sys.stderr):
        return False
    # Threads that Python does not know are those of a library, such as OpenBLAS, and do not end.
    return template_process.num_threads() <= threading.active_count()


def _is_forkable_soon() -> bool:
    """Tell whether this process can be forked, once threads that were asked to end have ended."""
    until_s = time.monotonic() + _ENDING_S
    while not template_process.is_forkable() and time.monotonic() < until_s:
        time.sleep(0.001)
    return template_process.is_forkable()


def can_fork() -> bool:
    """Tell whether processes can be forked from a template on this machine."""
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open") or os.environ.get(SWITCH) == "0":
        return False
    return not Path("/dev/nvidiactl").exists() and not os.environ.get("RAY_ADDRESS")


@contextlib.contextmanager
def started_template(
    modules: Sequence[str],
    env: Mapping[str, str],
    is_useful: bool = True,
    alone: Callable[[], AbstractContextManager[object]] | None = None,
) -> Iterator[Template | None]:
    """Start a template that loads these modules; None if it is of no use, or processes cannot be forked here.

    env: variables that libraries read when they are loaded, set as in the processes to be forked. alone: for a command
    that has just begun, makes a context in which its threads end. It may be forked there, with the modules loaded.
    """
    if not is_useful or not can_fork():
        yield None
        return
    template = Template(modules, env, alone)
    try:
        yield template
    finally:
        template.close()
