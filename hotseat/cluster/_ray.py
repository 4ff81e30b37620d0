"""The Ray runtime: groups as Ray actors. The only file that imports Ray, and only when a Ray cluster is used.

Own cluster: started on loopback with a token, in a temporary directory, and taken down with everything in it.
Existing cluster: only our actors, our placement group and what our workers started are taken down.

One placement group reserves the devices of all groups, one bundle per node. Actors ask Ray for no device of their
own: they sit in their node's bundle and see the devices that their process was given, through CUDA_VISIBLE_DEVICES,
which is set when the process starts. So several processes can share a device, and one process can have several.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ipaddress
import os
import re
import secrets
import signal
import socket
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from hotseat.cluster import _guard, activity
from hotseat.cluster._host import AsyncHost, Facts, Failure, Host, NodeAgent, free_port, is_async, stderr_tail
from hotseat.cluster._local import restore_environment
from hotseat.cluster.channel import Broker
from hotseat.cluster.group import (
    Calls,
    Group,
    Pending,
    Process,
    ProcessLike,
    Ref,
    raise_failure,
    resolve,
    worker_error,
)
from hotseat.cluster.lease import Holder
from hotseat.errors import ClusterError, DeadlineError, PlacementError, RunError, WorkerError

# Ray prints this about every worker that we end, or report ourselves.
_NOISE = "A worker died or was killed while executing a task by an unexpected system error"

_AGENT_TIMEOUT_S = 60.0

_DAEMONS = {"gcs_server": "GCS server", "raylet": "raylet"}  # Ray's name and ours, of those without which it cannot be
_DAEMON_PERIOD_S = 0.25


def import_ray() -> Any:
    """Ray, told first not to repeat what we report ourselves."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _NOISE)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    return ray


@dataclass(frozen=True)
class RayNode:
    """A node as Ray sees it."""

    id: str
    address: str
    hostname: str
    num_devices: int
    num_cpus: int
    memory_bytes: int
    is_head: bool


class RayRef(Ref):
    """A value in Ray's object store."""

    def __init__(self, ref: Any):
        self._ref = ref

    def get(self, *, timeout_s: float = 600.0) -> Any:
        ray = import_ray()
        try:
            return ray.get(self._ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(f"a kept result did not arrive in {timeout_s:.1f} s") from error
        except ray.exceptions.RayError as error:
            raise WorkerError(f"a kept result is lost: {error}") from error


# --- groups -----------------------------------------------------------------------------------------------------------


@dataclass
class _Slot:
    """One rank: where it runs and what runs there now."""

    process: ProcessLike
    actor: Any = None
    facts: Facts | None = None
    incarnation: int = 0
    mark: str = ""  # HOTSEAT_WORKER of the process and of what it starts
    ended_because: str = ""  # why we ended it ourselves


class RayGroup(Group):
    """A group of Ray actors. Can be passed to another worker, which may then call it but not restart or close it."""

    def __init__(
        self,
        name: str,
        slots: list[_Slot],
        *,
        timeout_s: float,
        log_directory: str,
        runtime: RayRuntime | None = None,
        make: Callable[[RayGroup, list[int], float], Pending] | None = None,
        has_close: bool = False,
    ):
        self.name = name
        self.timeout_s = timeout_s
        self._slots = slots
        self._log_directory = log_directory
        self._runtime = runtime  # None: a copy in another process
        self._make = make
        self._has_close = has_close
        self._starting: tuple[Pending, float] | None = None  # constructors under way, and how long they may take
        self._start_error: RunError | None = None  # why some constructors did not come to their end
        self._start_lock = threading.RLock()
        self.is_closed = False
        self._pending: weakref.WeakSet[Future[Any]] = weakref.WeakSet()

    def __reduce__(self) -> Any:
        slots = [
            _Slot(
                Process(s.process.rank, s.process.node, tuple(s.process.devices)),
                s.actor,
                s.facts,
                s.incarnation,
                s.mark,
            )
            for s in self._slots
        ]
        return _copy_of_group, (self.name, slots, self.timeout_s, self._log_directory)

    @property
    def ranks(self) -> range:
        return range(len(self._slots))

    def alive(self) -> list[bool]:
        return [self._state(rank) != "gone" for rank in self.ranks]

    def holders(self) -> tuple[Holder, ...]:
        self.ready()
        return tuple(
            Holder(self.name, slot.process.rank, slot.facts.pid, slot.facts.started, slot.process.node)
            for slot in self._slots
            if slot.facts is not None  # as of all, by now
        )

    def restart(self, rank: int, *, timeout_s: float | None = None) -> None:
        runtime = self._owner("restart")
        self._raise_if_lost()
        if self.is_closed:
            raise worker_error(self.name, rank, "restart", "cannot be restarted: the group is closed")
        self._settle()
        runtime.end_workers([self._slots[rank]])
        self._slots[rank].incarnation += 1
        self._slots[rank].ended_because = ""
        within_s = self._deadline(timeout_s)
        self._start_error = None
        assert self._make is not None
        self._starting = self._make(self, [rank], within_s), within_s
        self.ready()

    def ping(self, rank: int) -> Future[Any]:
        return self._slots[rank].actor.invoke.remote("health", (), {}, self.timeout_s).future()

    def end(self, rank: int, reason: str, *, pid: int | None = None) -> None:
        slot = replace(self._slots[rank])  # it may be restarted meanwhile, and the new one is not meant
        if pid is not None and (slot.facts is None or slot.facts.pid != pid):
            return
        if slot.incarnation == self._slots[rank].incarnation:
            self._slots[rank].ended_because = reason
        self._owner("end").end_workers([slot])

    def states(self) -> list[str]:
        return [self._state(rank) for rank in self.ranks]

    def known_pids(self) -> list[int | None]:
        here = socket.gethostname()
        return [slot.facts.pid if slot.facts and slot.facts.hostname == here else None for slot in self._slots]

    def ready(self) -> None:
        self._settle()
        if self._start_error is not None:
            raise self._start_error  # to whoever asks, until what failed is started again

    def _settle(self) -> None:
        """Wait for constructors under way. If one fails, those that are not done by then have failed too."""
        with self._start_lock:
            if self._starting is None:
                return
            pending, within_s = self._starting
            try:
                pending.result(within_s)
            except RunError as error:
                self._start_error = error
            for rank, future in pending._futures.items():
                with contextlib.suppress(RunError):
                    if future.done():
                        self._slots[rank].facts = self._open(rank, "__init__", future)
            self._starting = None

    def close(self, *, grace_s: float = 5.0) -> None:
        runtime = self._owner("close")
        if self.is_closed:
            return
        self._ask_to_close(grace_s)
        self.is_closed = True
        runtime.end_workers(self._slots)
        self._wake_waiters()
        runtime.groups.pop(self.name, None)

    def _ask_to_close(self, grace_s: float) -> None:
        if self._has_close and self._starting is None and not self.is_closed and grace_s > 0:
            with contextlib.suppress(RunError):  # it ends anyway; the grace is for those who can use it
                pending = self.start("close", timeout_s=grace_s)
                concurrent.futures.wait(pending._futures.values(), timeout=grace_s)

    def _wake_waiters(self) -> None:
        until = time.monotonic() + 2.0
        for future in list(self._pending):
            # Ray wakes them when it sees the actor gone. Whom it forgets, we wake.
            with contextlib.suppress(Exception):
                future.exception(max(0.0, until - time.monotonic()))
            if not future.done():
                with contextlib.suppress(Exception):
                    future.set_exception(WorkerError(f"{self.name}: closed"))

    def _owner(self, action: str) -> RayRuntime:
        if self._runtime is None:
            raise RunError(f"{self.name}: only the process that launched the group can {action} it")
        return self._runtime

    def lose(self, error: ClusterError) -> None:
        """Fail every call that waits for an answer: none will come."""
        starting = () if self._starting is None else tuple(self._starting[0]._futures.values())
        for future in (*self._pending, *starting):
            if not future.done():
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was answered just now
                    future.set_exception(error)

    def _raise_if_lost(self) -> None:
        if self._runtime is not None and (lost := self._runtime.lost()) is not None:
            raise lost

    def _start(self, method: str, calls: Calls, timeout_s: float, keep: bool) -> Pending:
        self._raise_if_lost()
        if self.is_closed:
            raise worker_error(self.name, min(calls), method, f"{method!r} was called, but the group is closed")
        self.ready()
        futures = {}
        for rank, (args, kwargs) in calls.items():
            actor = self._slots[rank].actor
            if keep:
                status, value = actor.invoke_and_keep.options(num_returns=2).remote(method, args, kwargs, timeout_s)
                futures[rank] = status.future()
                futures[rank].kept = RayRef(value)
            else:
                futures[rank] = actor.invoke.remote(method, args, kwargs, timeout_s).future()
            futures[rank].slot = replace(self._slots[rank])  # it may be restarted before the answer comes
            self._pending.add(futures[rank])
        return Pending(self, method, futures)

    def _open(self, rank: int, method: str, future: Any) -> Any:
        ray = import_ray()
        if future.exception(0) is not None:
            self._raise_if_lost()
        try:
            result = future.result(0)
        except ray.exceptions.RayActorError as error:
            raise self._death(rank, method, error, future.slot) from error
        except ray.exceptions.RayTaskError as error:
            # Our host lets no exception out: this one is about what it was sent, or what it sends back.
            cause = error.cause or error
            message = f"arguments or result of {method!r} cannot be sent: {type(cause).__qualname__}: {cause}"
            raise worker_error(self.name, rank, method, message) from error
        except ray.exceptions.RayError as error:
            raise worker_error(self.name, rank, method, f"{method!r} failed in Ray: {error}") from error
        except WorkerError as error:
            raise worker_error(
                self.name, rank, method, f"{method!r} was under way when the group was closed"
            ) from error
        if isinstance(result, Failure):
            raise_failure(self.name, rank, method, result)
        return getattr(future, "kept", result)

    def _death(self, rank: int, method: str, error: Exception, slot: _Slot) -> WorkerError:
        if self.is_closed:
            return worker_error(self.name, rank, method, f"{method!r} was under way when the group was closed")
        if slot.incarnation != self._slots[rank].incarnation:
            return worker_error(self.name, rank, method, f"{method!r} was under way when the rank was restarted")
        pid = slot.facts.pid if slot.facts else _pid_in(error)
        detail = str(error).partition("Worker exit detail:")[2].partition("Some common causes")[0].strip()
        detail = detail or str(error).strip().splitlines()[-1].strip()
        if self._runtime:
            # What it started would keep its memory and its ports.
            self._runtime.end_workers([slot])
        tail = stderr_tail(self._log_directory, pid) if pid else ""
        who = f"its process{f' (pid {pid})' if pid else ''}"
        message = f"{who} died during {method!r}: {detail}"
        if because := self._slots[rank].ended_because:
            message, tail = f"{who} was ended during {method!r}: {because}", ""
        death = worker_error(self.name, rank, method, message, f"the last it wrote to stderr:\n{tail}" if tail else "")
        death.is_death = True  # type: ignore[attr-defined]
        return death

    def _state(self, rank: int) -> str:
        slot = self._slots[rank]
        if self._starting is not None and slot.facts is None and not self.is_closed:
            return "starting"
        if self.is_closed or slot.facts is None:
            return "gone"
        if self._runtime:
            return self._runtime.process_state(slot.process.node, slot.facts.pid, slot.facts.started)
        if slot.facts.hostname == socket.gethostname():
            return _guard.process_state(slot.facts.pid, slot.facts.started)
        return "running"  # on another machine, as far as this copy of the group knows

    def _describe(self, rank: int) -> str:
        slot = self._slots[rank]
        if slot.facts is None:
            return "was still starting"
        return f"(pid {slot.facts.pid} on {slot.facts.hostname}) is {self._state(rank)}"


def _pid_in(error: Exception) -> int | None:
    """Of a process that died in its constructor, before it could say so itself."""
    found = re.search(r"^\s*pid: (\d+)$", str(error), re.MULTILINE)
    return int(found[1]) if found else None


def _copy_of_group(name: str, slots: list[_Slot], timeout_s: float, log_directory: str) -> RayGroup:
    return RayGroup(name, slots, timeout_s=timeout_s, log_directory=log_directory)


# --- the cluster ------------------------------------------------------------------------------------------------------


@dataclass
class _Reservation:
    """The placement group, and for each node its bundle and the physical device behind each of our numbers."""

    group: Any
    bundle: dict[int, int] = field(default_factory=dict)
    visible: dict[int, str] = field(default_factory=dict)  # device -> what CUDA_VISIBLE_DEVICES calls it


class RayRuntime:
    """Connection to Ray: a cluster of our own, or one that was there."""

    def __init__(
        self,
        *,
        session: str,
        shm_prefix: str,
        directory: str,
        address: str | None,
        num_devices: int | None,
        num_cpus: int | None,
        object_store_bytes: int,
        log_to_driver: bool,
    ):
        self.session = session
        self.groups: dict[str, RayGroup] = {}
        self._shm_prefix = shm_prefix
        self._directory = directory
        self._reservation: _Reservation | None = None
        self._agents: dict[int, Any] = {}
        self._brokers: dict[int, tuple[Any, bytes]] = {}
        self._broker_here: Broker | None = None
        self._num_launched = 0
        self._lock = threading.RLock()
        self._env_before: dict[str, str | None] = {}
        self._daemons: _Daemons | None = None

        given = address or os.environ.get("RAY_ADDRESS") or None
        self._ray = ray = import_ray()
        self._did_init = not ray.is_initialized()
        self.is_own = self._did_init and (given is None or given == "local")
        with _signals_kept():
            self._connect(given, num_devices, num_cpus, object_store_bytes, log_to_driver)
        try:
            self.nodes = self._inventory()
            here = ray.get_runtime_context().get_node_id()
            self.home = next((rank for rank, node in enumerate(self.nodes) if node.id == here), 0)
            self._log_directory = ""
            with contextlib.suppress(AttributeError):
                self._log_directory = ray._private.worker._global_node.get_logs_dir_path()
            if self.is_own:
                self._daemons = _Daemons(ray._private.worker._global_node.all_processes, self._lose)
        except BaseException:
            self.close(grace_s=0)
            raise

    # --- starting -------------------------------------------------------------------------------------------------

    def _connect(
        self,
        given: str | None,
        num_devices: int | None,
        num_cpus: int | None,
        object_store_bytes: int,
        log_to_driver: bool,
    ) -> None:
        if self.is_own:
            self._start_own(num_devices, num_cpus, object_store_bytes, log_to_driver)
        else:
            if num_devices is not None:
                raise PlacementError(
                    f"num_devices is {num_devices}, but the Ray cluster at {given or 'hand'} exists and has its own"
                    " devices; leave num_devices out, or unset RAY_ADDRESS to start a cluster here"
                )
            if self._did_init and given is not None:
                self._attach(given, log_to_driver)

    def _start_own(
        self, num_devices: int | None, num_cpus: int | None, object_store_bytes: int, log_to_driver: bool
    ) -> None:
        ray = self._ray
        variables = {
            _guard.SESSION: self.session,  # for the daemons: they start with this environment
            # The name is Ray's, for the platforms where it is the default: everything on loopback.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        if not os.environ.get("RAY_AUTH_MODE"):
            variables["RAY_AUTH_MODE"] = "token"
            if not os.environ.get("RAY_AUTH_TOKEN") and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
                variables["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        self._env_before = {key: os.environ.get(key) for key in variables}
        os.environ.update(variables)
        self._refresh_auth()
        number_before = _guard.mark_this_process(self.session)
        constants = ray._private.ray_constants
        on_network = getattr(constants, "ENABLE_RAY_CLUSTER", None)
        if on_network is not None:
            constants.ENABLE_RAY_CLUSTER = False  # in case Ray was imported before we could say so
        try:
            with _daemons_in_own_groups():
                ray.init(
                    address="local",
                    num_gpus=num_devices,
                    num_cpus=num_cpus,
                    object_store_memory=object_store_bytes,
                    include_dashboard=False,
                    log_to_driver=log_to_driver,
                    logging_level="error",
                    _temp_dir=os.path.join(self._directory, "ray"),
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
            self._restore_env()
            raise
        finally:
            _guard.remark_this_process(number_before)
            if on_network is not None:
                constants.ENABLE_RAY_CLUSTER = on_network
            os.environ.pop(_guard.SESSION, None)
            if (outer := self._env_before.get(_guard.SESSION)) is not None:
                os.environ[_guard.SESSION] = outer

    def _attach(self, address: str, log_to_driver: bool) -> None:
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
            is_from_env = address == os.environ.get("RAY_ADDRESS")
            self._ray.init(address=None if is_from_env else address, log_to_driver=log_to_driver, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError, self._ray.exceptions.RayError) as error:
            raise RunError(
                f"could not attach to the Ray cluster at {address}: {error}\nIf it asks for a token, set"
                " RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as on the cluster."
            ) from error

    def _restore_env(self) -> None:
        restore_environment(self._env_before)
        self._env_before = {}
        self._refresh_auth()

    def _refresh_auth(self) -> None:
        """Ray remembers the token of the first cluster it saw in a process; the next one may have another."""
        with contextlib.suppress(ImportError, AttributeError):
            from ray._raylet import AuthenticationTokenLoader, Config

            Config.initialize("")
            AuthenticationTokenLoader.instance().reset_cache()

    def _inventory(self) -> list[RayNode]:
        """Nodes in an order that a restart of the cluster does not change: the head, then by address and by name."""
        found = []
        for node in self._ray.nodes():
            if not node["Alive"]:
                continue
            resources = node["Resources"]
            entry = RayNode(
                id=node["NodeID"],
                address=node["NodeManagerAddress"],
                hostname=node["NodeManagerHostname"],
                num_devices=int(resources.get("GPU", 0)),
                num_cpus=int(resources.get("CPU", 0)),
                memory_bytes=int(resources.get("memory", 0)),
                is_head="node:__internal_head__" in resources,
            )
            found.append(
                (not entry.is_head, _address_key(entry.address), str(node.get("NodeName", "")), entry.id, entry)
            )
        return [entry for *_, entry in sorted(found, key=lambda item: item[:-1])]

    def lost(self) -> ClusterError | None:
        """Why Ray can do nothing any more, if its daemons were started here and one is gone."""
        return None if self._daemons is None else self._daemons.lost()

    def _lose(self, error: ClusterError) -> None:
        for group in list(self.groups.values()):
            group.lose(error)

    # --- devices --------------------------------------------------------------------------------------------------

    def reserve(
        self, devices: Mapping[int, Sequence[int]], first: Sequence[int], num_cpus: float, timeout_s: float
    ) -> None:
        """Reserve these devices of each node. `first[node]` is the number of the node's first device."""
        from ray.util.placement_group import placement_group, remove_placement_group

        order = sorted(devices)
        bundles = []
        for rank in order:
            bundle = {"GPU": len(devices[rank]), "CPU": num_cpus}
            bundle = {resource: amount for resource, amount in bundle.items() if amount > 0}
            bundles.append(bundle or {f"node:{self.nodes[rank].address}": 0.001})
        group = placement_group(
            bundles,
            strategy="PACK",
            bundle_label_selector=[{"ray.io/node-id": self.nodes[rank].id} for rank in order],
        )
        if not group.wait(timeout_s):
            free = self._ray.available_resources()
            remove_placement_group(group)
            wanted = ", ".join(f"node {rank}: {len(devices[rank])} devices" for rank in order)
            raise PlacementError(
                f"could not reserve {wanted}"
                + (f" and {num_cpus:g} CPUs each" if num_cpus else "")
                + f" in {timeout_s:.0f} s:"
                f" Ray has {free.get('GPU', 0):g} devices and {free.get('CPU', 0):g} CPUs free;"
                " wait for other jobs to end, or place the roles on fewer devices"
            )
        reservation = _Reservation(group, bundle={rank: index for index, rank in enumerate(order)})
        self._reservation = reservation
        for rank in order:
            mine = sorted(devices[rank])
            if self.is_own:
                names = self._own_names(mine, first[rank])
            else:
                names = self._physical(reservation, rank, len(mine))
            reservation.visible.update(zip(mine, names, strict=True))

    def _own_names(self, devices: list[int], first: int) -> list[str]:
        return [self.own_name(device - first) for device in devices]

    def own_name(self, index: int) -> str:
        """What CUDA_VISIBLE_DEVICES calls a device of this node."""
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = [name.strip() for name in given.split(",") if name.strip()]
        return names[index] if index < len(names) else str(index)

    def device_name(self, device: int) -> str | None:
        """The same of a device that is reserved; None if it is not."""
        return None if self._reservation is None else self._reservation.visible.get(device)

    def _physical(self, reservation: _Reservation, rank: int, count: int) -> list[str]:
        """Which devices Ray set aside in this node's bundle: other jobs may have the first ones."""
        if not count:
            return []
        ray = self._ray
        options = self._options(reservation, rank, {}) | {"num_gpus": count}
        ref = ray.remote(_visible_devices).options(**options).remote()
        try:
            names = [str(name) for name in ray.get(ref, timeout=_AGENT_TIMEOUT_S)]
        except ray.exceptions.RayError as error:
            raise PlacementError(f"node {rank} did not say which devices were reserved on it: {error}") from error
        return sorted(names, key=lambda name: (len(name), name))

    def _options(self, reservation: _Reservation, node: int, env: Mapping[str, str]) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            placement_group=reservation.group, placement_group_bundle_index=reservation.bundle[node]
        )
        return {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": {**self._session_env(), **self._activity_env(node), **env}},
        }

    def _activity_env(self, node: int) -> dict[str, str]:
        """Only where the doctor can read it."""
        return {activity.DIRECTORY: os.environ[activity.DIRECTORY]} if node == self.home else {}

    def _session_env(self) -> dict[str, str]:
        return {
            _guard.SESSION: self.session,
            _guard.SHM_PREFIX: self._shm_prefix,
            "PYTHONPATH": _python_path(),
        }

    # --- launching ------------------------------------------------------------------------------------------------

    def launch(
        self,
        name: str,
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        per_rank: Sequence[Mapping[str, Any]],
        processes: Sequence[ProcessLike],
        *,
        env: Callable[[ProcessLike], Mapping[str, str]],
        timeout_s: float,
        start_timeout_s: float,
        max_concurrency: int,
        wait: bool,
    ) -> RayGroup:
        reservation = self._reservation
        assert reservation is not None
        for process in processes:
            missing = [device for device in process.devices if device not in reservation.visible]
            if missing or process.node not in reservation.bundle:
                raise PlacementError(
                    f"{name} rank {process.rank} is placed on node {process.node}, devices {list(process.devices)},"
                    f" of which {missing or 'the node'} was not reserved; reserve the processes of all groups before"
                    " the first launch"
                )
        host_class = AsyncHost if is_async(cls) else Host
        concurrency = (
            max(max_concurrency, 1000) if host_class is AsyncHost and max_concurrency == 1 else max_concurrency
        )
        master_node = processes[0].node
        master_address = self.nodes[master_node].address
        master_port = self.free_port(master_node)
        session, plain_name = self.session.rpartition("/")[2], re.sub("[:/]", "_", name)
        launched = self._num_launched = self._num_launched + 1  # names are used again

        def make(group: RayGroup, ranks: list[int], within_s: float) -> Pending:
            for rank in ranks:
                slot = group._slots[rank]
                slot.mark = f"{session}:{plain_name}:{rank}:{launched}.{slot.incarnation}"
                slot.facts = None
                variables = {
                    **self._rank_env(processes, rank, master_address, master_port),
                    **env(slot.process),
                    **self._device_env(slot.process),
                    _guard.WORKER: slot.mark,
                }
                options = self._options(reservation, slot.process.node, variables)
                slot.actor = (
                    self._ray.remote(host_class)
                    .options(**options, max_concurrency=concurrency, max_restarts=0, max_task_retries=0)
                    .remote(resolve)
                )
            futures = {}
            for rank in ranks:
                slot = group._slots[rank]
                futures[rank] = slot.actor.construct.remote(cls, args, {**kwargs, **per_rank[rank]}, within_s).future()
                futures[rank].slot = replace(slot)
            return Pending(group, "__init__", futures)

        group = RayGroup(
            name,
            [_Slot(process) for process in processes],
            timeout_s=timeout_s,
            log_directory=self._log_directory,
            runtime=self,
            make=make,
            has_close=callable(getattr(cls, "close", None)),
        )
        try:
            group._starting = make(group, list(group.ranks), start_timeout_s), start_timeout_s
            if wait:
                group.ready()
        except BaseException:
            self.end_workers(group._slots)
            raise
        self.groups[name] = group
        return group

    def _rank_env(self, processes: Sequence[ProcessLike], rank: int, address: str, port: int) -> dict[str, str]:
        node = processes[rank].node
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(processes)),
            "LOCAL_RANK": str(sum(other.node == node for other in processes[:rank])),
            "LOCAL_WORLD_SIZE": str(sum(other.node == node for other in processes)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        if _is_loopback(address):
            # Otherwise collectives would listen on whatever address the host name stands for.
            interface = "lo" if sys.platform.startswith("linux") else "lo0"
            names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            variables |= dict.fromkeys(names, interface)
        return variables

    def _device_env(self, process: ProcessLike) -> dict[str, str]:
        assert self._reservation is not None
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(self._reservation.visible[device] for device in process.devices),
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as the management library counts
        }

    # --- on the nodes ---------------------------------------------------------------------------------------------

    def _agent(self, node: int) -> Any:
        """The agent on another node than the driver's."""
        with self._lock:
            if node not in self._agents:
                from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

                options = {
                    "num_cpus": 0,
                    "max_concurrency": 4,
                    "scheduling_strategy": NodeAffinitySchedulingStrategy(self.nodes[node].id, soft=False),
                    "runtime_env": {"env_vars": self._session_env()},
                }
                agent = self._ray.remote(NodeAgent).options(**options)
                self._agents[node] = agent.remote(self.session, self._shm_prefix, f"{self._directory}-{node}")
            return self._agents[node]

    def _ask_agent(self, node: int, method: str, *args: Any, timeout_s: float = _AGENT_TIMEOUT_S) -> Any:
        ray = self._ray
        try:
            return ray.get(getattr(self._agent(node), method).remote(*args), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(f"the agent on node {node} did not answer {method!r} in {timeout_s:.0f} s") from error
        except ray.exceptions.RayError as error:
            raise WorkerError(f"the agent on node {node} failed at {method!r}: {error}") from error

    def free_port(self, node: int) -> int:
        host = self.nodes[node].address
        return free_port(host) if node == self.home else self._ask_agent(node, "free_port", host)

    def process_state(self, node: int, pid: int, started: int | None) -> str:
        if node == self.home:
            return _guard.process_state(pid, started)
        try:
            return self._ask_agent(node, "process_state", pid, started)
        except RunError:
            return "gone" if node not in self._live_nodes() else "running"

    def _live_nodes(self) -> set[int]:
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        return {rank for rank, node in enumerate(self.nodes) if node.id in alive}

    def end_workers(self, slots: Iterable[_Slot]) -> None:
        """End these processes and whatever they started; return when they are gone."""
        slots = [slot for slot in slots if slot.actor is not None]
        for slot in slots if self.lost() is None else ():  # without its server Ray waits for it, for ever
            with contextlib.suppress(Exception):
                self._ray.kill(slot.actor)
        by_node: dict[int, list[str]] = {}
        for slot in slots:
            by_node.setdefault(slot.process.node, []).append(slot.mark)
        for node, marks in by_node.items():
            if node == self.home:
                _guard.end_marked(_guard.WORKER, marks, timeout_s=5.0)
            else:
                with contextlib.suppress(RunError):
                    self._ask_agent(node, "end_workers", marks)

    def broker(self, node: int) -> tuple[Any, bytes]:
        """Address and key of the channel broker on this node; started when first asked for."""
        with self._lock:
            if node not in self._brokers:
                host = None if self.is_own else self.nodes[node].address
                if node == self.home:
                    self._broker_here = Broker(self._directory, host=host, env={_guard.SESSION: self.session})
                    self._brokers[node] = (self._broker_here.address, self._broker_here.key)
                else:
                    self._brokers[node] = self._ask_agent(node, "start_broker", host)
            return self._brokers[node]

    def put(self, value: Any) -> RayRef:
        return RayRef(self._ray.put(value))

    # --- ending ---------------------------------------------------------------------------------------------------

    def close(self, grace_s: float) -> None:
        """Take down what is ours. Called once; each step is tried even if the one before it failed."""
        ray = self._ray
        groups = list(self.groups.values())
        if self._daemons is not None:
            self._daemons.close()
            if self.lost() is not None:
                self._close_what_is_left(groups)
                return
            self._daemons = None  # from here on they end because we end them
        if grace_s > 0:
            threads = [threading.Thread(target=g._ask_to_close, args=(grace_s,), daemon=True) for g in groups]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(grace_s + 1.0)
        with contextlib.suppress(Exception):
            for group in groups:
                group.is_closed = True
            self.end_workers([slot for group in groups for slot in group._slots])
            for group in groups:
                group._wake_waiters()
        if self._reservation is not None:
            with contextlib.suppress(Exception):
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(self._reservation.group)
        for node, agent in self._agents.items():
            with contextlib.suppress(Exception):
                self._ask_agent(node, "end_session", timeout_s=15.0)
            with contextlib.suppress(Exception):
                ray.kill(agent)
        if self._broker_here:
            self._broker_here.close()
        if self._did_init:
            ray.shutdown()
        self._restore_env()

    def _close_what_is_left(self, groups: list[RayGroup]) -> None:
        """Take down a cluster whose daemons are gone: by the marks of its processes, since Ray cannot be asked."""
        for group in groups:
            group.is_closed = True
        _guard.end_marked(_guard.SESSION, [self.session.rpartition("/")[2]])
        if self._broker_here:
            self._broker_here.close()
        with contextlib.suppress(Exception):  # it forgets the cluster, which is all that is left to do
            self._ray.shutdown()
        self._restore_env()


class _Daemons:
    """A thread that looks whether Ray's own processes live, and tells `on_loss` once when one is gone.

    Without it a call would wait until Ray gives up, and Ray gives up by ending this process. Woken by `close`.
    """

    def __init__(self, processes: Mapping[str, Sequence[Any]], on_loss: Callable[[ClusterError], object]):
        """`processes`: Ray's, by its own names for them, each with a `process` that has a `pid`."""
        self._watched = [
            (words, entry.process.pid, _guard.start_time(entry.process.pid))
            for name, words in _DAEMONS.items()
            for entry in processes.get(name, ())
        ]
        self._on_loss = on_loss
        self._error: ClusterError | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray-daemons", daemon=True)
        self._thread.start()

    def lost(self) -> ClusterError | None:
        """The error that says which of them is gone."""
        if self._error is None:
            for words, pid, started in self._watched:
                if _guard.process_state(pid, started) == "gone":
                    self._error = ClusterError(
                        f"Ray's {words} (pid {pid}) died: without it no process of this run can be reached, so the run"
                        " ends. It was killed, by hand or for want of memory (`dmesg` tells), or it crashed"
                    )
                    break
        return self._error

    def close(self) -> None:
        self._is_closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _watch(self) -> None:
        while not self._is_closing.wait(_DAEMON_PERIOD_S):
            if (error := self.lost()) is not None:
                self._on_loss(error)
                return


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray sets a handler below Python's that makes SIGTERM a crash: whoever had one before gets it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _daemons_in_own_groups() -> Iterator[None]:
    """Start Ray's daemons, and so all workers, outside of this process's group.

    `timeout` and batch schedulers send SIGTERM to the whole group. It is meant for the driver, which then saves: with
    its cluster dead it could not.
    """
    from ray._private import services

    usual = services.ConsolePopen

    class OwnGroup(usual):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, process_group=0, **options)

    services.ConsolePopen = OwnGroup
    try:
        yield
    finally:
        services.ConsolePopen = usual


def _python_path() -> str:
    """What this process can import beyond what is installed, so that its workers can import it too."""
    installed = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    paths = (path or os.getcwd() for path in sys.path)
    own = [path for path in paths if os.path.isdir(path) and not os.path.realpath(path).startswith(tuple(installed))]
    return os.pathsep.join(dict.fromkeys(own))


def _visible_devices() -> list[Any]:
    import ray

    return ray.get_runtime_context().get_accelerator_ids().get("GPU", [])


def _address_key(address: str) -> tuple[int, int, str]:
    try:
        parsed = ipaddress.ip_address(address)
        return parsed.version, int(parsed), ""
    except ValueError:
        return 9, 0, address


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"
