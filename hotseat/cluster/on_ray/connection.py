"""A connection to Ray: a cluster started here, or one that exists.

A cluster of our own is started on loopback with a token, in a temporary directory, and ends with the connection.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hotseat import faults
from hotseat.closing import on_failure
from hotseat.cluster.device_memory import device_memory, own_device_name
from hotseat.cluster.environment import restore_environment
from hotseat.cluster.on_ray.library import RAY_ENV, import_ray, refresh_settings
from hotseat.cluster.on_ray.template import Template
from hotseat.cluster.runtime import ClusterNode
from hotseat.cluster.session import Session
from hotseat.errors import PlacementError, RunError
from hotseat.processes import kept_driver, supervisor

_NO_HANDLER = "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"  # of a process that connects to Ray


def is_start_too_slow(error: Exception) -> bool:
    """Tell whether Ray gave up on its own daemons, which have 30 s to start: too short on a busy machine."""
    return "timed out during startup" in str(error)


class RayConnection:
    """Ray in this process. `close` ends a cluster that was started here, and leaves one that was there.

    num_devices, num_cpus, object_store_bytes, has_dashboard: of a cluster that is started here.
    template: has the Python processes of such a cluster forked.
    """

    def __init__(
        self,
        session: Session,
        *,
        num_devices: int | None,
        num_cpus: int | None,
        object_store_bytes: int,
        template: Template | None = None,
        has_dashboard: bool = False,
    ):
        self._template = template
        self._has_dashboard = has_dashboard
        self.ray = ray = import_ray()
        self._session = session
        self._env_before: dict[str, str | None] = {}
        address = os.environ.get("RAY_ADDRESS") or None
        self._did_init = not ray.is_initialized()
        self.is_own = self._did_init and (address is None or address == "local")
        with _signals_left_alone(ray):
            if self.is_own:
                self._start_own(
                    {"num_gpus": num_devices, "num_cpus": num_cpus, "object_store_memory": object_store_bytes}
                )
            elif num_devices is not None:
                raise PlacementError(
                    f"num_devices is {num_devices}, but the Ray cluster at {address or 'hand'} exists and has its own"
                    " devices; leave num_devices out, or unset RAY_ADDRESS to start a cluster here"
                )
            elif self._did_init and address is not None:
                self._attach(address)
        with on_failure(self.close):
            self.nodes = self._inventory()
            here = ray.get_runtime_context().get_node_id()
            self.home = next((rank for rank, node in enumerate(self.nodes) if node.id == here), 0)
            self.log_directory = ""
            with contextlib.suppress(AttributeError):
                self.log_directory = ray._private.worker._global_node.get_logs_dir_path()

    def daemons(self) -> Mapping[str, Sequence[Any]]:
        """Return the processes of a cluster that was started here, by Ray's names for them."""
        return self.ray._private.worker._global_node.all_processes

    @property
    def dashboard_url(self) -> str | None:
        """Return the address of Ray's dashboard, if it was started here."""
        if not (self.is_own and self._has_dashboard):
            return None
        address = self.ray._private.worker._global_node.webui_url
        return f"http://{address}" if address else None

    def live_nodes(self) -> set[int]:
        """Return the ranks of the nodes that Ray has not lost."""
        alive = {node["NodeID"] for node in self.ray.nodes() if node["Alive"]}
        return {rank for rank, node in enumerate(self.nodes) if node.id in alive}

    def close(self) -> None:
        if self._did_init:
            self.ray.shutdown()
        self._restore_env()

    def forget(self) -> None:
        """Close the connection to a cluster that is gone.

        Ray's library waits 5 s for it. A driver that is to be started again ends next, and need not close anything.
        """
        if not kept_driver.is_kept():
            with contextlib.suppress(Exception):
                self.ray.shutdown()
        self._restore_env()

    def _start_own(self, resources: Mapping[str, int | None]) -> None:
        """Start Ray here, once more if the machine was too busy for it."""
        try:
            self._start_once(resources)
        except Exception as error:
            if not is_start_too_slow(error):
                raise
            self._start_once(resources)

    def _start_once(self, resources: Mapping[str, int | None]) -> None:
        ray = self.ray
        variables = {
            supervisor.SESSION: self._session.id,  # for the daemons: they start with this environment
            **RAY_ENV,
        }
        if not os.environ.get("RAY_AUTH_MODE"):
            variables["RAY_AUTH_MODE"] = "token"
            if not os.environ.get("RAY_AUTH_TOKEN") and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
                variables["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        outer = os.environ.get(supervisor.SESSION)
        self._env_before = {key: os.environ.get(key) for key in variables}
        os.environ.update(variables)
        refresh_settings()
        number_before = supervisor.mark_this_process(self._session.id)
        constants = ray._private.ray_constants
        on_network = getattr(constants, "ENABLE_RAY_CLUSTER", None)
        if on_network is not None:
            constants.ENABLE_RAY_CLUSTER = False  # in case Ray was imported before we could say so
        try:
            with _lean_daemons(self._template, self._has_dashboard):
                ray.init(
                    address="local",
                    **resources,
                    include_dashboard=self._has_dashboard,
                    dashboard_host="127.0.0.1",
                    log_to_driver=False,
                    logging_level="error",
                    _temp_dir=os.path.join(self._session.directory, "ray"),
                    _system_config={
                        # Our workers have environments of their own: one that starts before it is asked for is never
                        # used.
                        "enable_worker_prestart": False,
                        "prestart_worker_first_driver": False,
                        # Without its server Ray can do nothing but end this process. Not after a minute.
                        "gcs_rpc_server_reconnect_timeout_s": 20,
                    },
                )
        except BaseException:
            with contextlib.suppress(Exception):
                ray.shutdown()
            supervisor.end_marked(
                supervisor.SESSION, [self._session.name]
            )  # daemons that Ray has started and does not know of
            self._restore_env()
            raise
        finally:
            supervisor.remark_this_process(number_before)
            if on_network is not None:
                constants.ENABLE_RAY_CLUSTER = on_network
            os.environ.pop(supervisor.SESSION, None)
            if outer is not None:
                os.environ[supervisor.SESSION] = outer

    def _attach(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        if address.startswith("ray://"):
            raise PlacementError(
                f"{address} is a Ray client address, which cannot place groups; use `ray job submit`, or set"
                " RAY_ADDRESS to the host:port that `ray start` prints"
            )
        if host and port.isdigit():
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
            except OSError as error:
                raise PlacementError(
                    f"no Ray cluster answers at {address} ({error}); start it, or unset RAY_ADDRESS to start one here"
                ) from error
        try:
            # By the variable rather than by the argument: only then does Ray look for a token by itself.
            self.ray.init(log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError, self.ray.exceptions.RayError) as error:
            raise RunError(
                f"could not attach to the Ray cluster at {address}: {error}\nIf it asks for a token, set"
                " RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as on the cluster."
            ) from error

    def _restore_env(self) -> None:
        restore_environment(self._env_before)
        self._env_before = {}
        refresh_settings()

    def _inventory(self) -> tuple[ClusterNode, ...]:
        """List nodes in an order that a restart of the cluster keeps: the head, then by address and by name."""
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        nodes.sort(key=_node_order)
        num_devices = [int(node["Resources"].get("GPU", 0)) for node in nodes]
        # The devices of other nodes are taken to be like those of this one.
        first = device_memory(own_device_name(0)) if num_devices[0] else None
        return tuple(
            ClusterNode(
                rank,
                num_devices[rank],
                address=node["NodeManagerAddress"],
                hostname=node["NodeManagerHostname"],
                id=node["NodeID"],
                device_bytes=None if first is None else first.total,
            )
            for rank, node in enumerate(nodes)
        )


@contextlib.contextmanager
def _signals_left_alone(ray: Any) -> Iterator[None]:
    """Connect without Ray's handlers of SIGTERM: one exits without a word, and one below Python's makes it a crash.

    SIGTERM then does while Ray starts what it does at any other time.
    """
    utils = ray._private.utils
    usual, before, variable = utils.set_sigterm_handler, signal.getsignal(signal.SIGTERM), os.environ.get(_NO_HANDLER)
    utils.set_sigterm_handler = lambda handler: None
    os.environ[_NO_HANDLER] = "1"
    try:
        yield
    finally:
        utils.set_sigterm_handler = usual
        restore_environment({_NO_HANDLER: variable})
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # a Ray that does not know the variable has set its own


@contextlib.contextmanager
def _lean_daemons(template: Template | None, has_dashboard: bool = False) -> Iterator[None]:
    """Start only the daemons that a run needs, in groups of their own, and have their Python processes forked.

    `timeout` and batch schedulers send SIGTERM to the whole group of this process. It is meant for the driver, which
    then saves: with its cluster dead it could not. Left out are the autoscaler, the monitor of logs, and the dashboard
    unless it is asked for: each is a Python process whose start Ray waits for, or that takes a core from those who
    start.
    """
    from ray._private import node, services

    class Daemon(services.ConsolePopen):
        def __init__(self, command: Any, *args: Any, **options: Any):
            faults.reach("ray")
            if options.get("env"):  # workers keep the handler that prints where they crashed
                options["env"] = {name: value for name, value in options["env"].items() if name != _NO_HANDLER}
            super().__init__(_lean_command(command, template, has_dashboard), *args, process_group=0, **options)

    unneeded = ["start_monitor", "start_log_monitor", *([] if has_dashboard else ["start_api_server"])]
    before = [(node.Node, name, getattr(node.Node, name)) for name in unneeded if hasattr(node.Node, name)]
    before.append((services, "ConsolePopen", services.ConsolePopen))
    for owner, name, _ in before[:-1]:
        setattr(owner, name, lambda *_, **__: None)
    services.ConsolePopen = Daemon
    try:
        yield
    finally:
        for owner, name, usual in before:
            setattr(owner, name, usual)


def _lean_command(command: Any, template: Template | None, has_dashboard: bool = False) -> Any:
    """Change the command of the raylet: its Python processes are forked, and its agent collects nothing.

    With a dashboard, which shows what agents collect, they are Ray's own.
    """
    if not isinstance(command, list) or os.path.basename(command[0]) != "raylet":
        return command
    for_workers = () if template is None else template.for_workers
    for_agents = () if template is None or has_dashboard else template.for_agents
    prefixes = {"python_worker": for_workers, "dashboard_agent": for_agents, "runtime_env_agent": for_agents}
    python, changed = subprocess.list2cmdline([sys.executable]), []
    for argument in command:
        name = argument.partition("_command=")[0].removeprefix("--")
        start = f"--{name}_command={python} "
        if name in prefixes and argument.startswith(start):
            rest = argument.removeprefix(start)
            words = [start.rstrip(), subprocess.list2cmdline(prefixes[name]), rest]
            if name == "dashboard_agent" and not has_dashboard and " --minimal" not in rest:
                words.append("--minimal")
            argument = " ".join(filter(None, words))
        changed.append(argument)
    return changed


def _node_order(node: Mapping[str, Any]) -> tuple[Any, ...]:
    address = node["NodeManagerAddress"]
    try:
        parsed = ipaddress.ip_address(address)
        by_address: tuple[Any, ...] = (parsed.version, int(parsed), "")
    except ValueError:
        by_address = (9, 0, address)
    is_head = "node:__internal_head__" in node["Resources"]
    return not is_head, by_address, str(node.get("NodeName", "")), node["NodeID"]
