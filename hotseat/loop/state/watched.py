"""Signs of life of a run while it goes on, for those who watch it from outside, and the endpoint for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hotseat.config import Config
from hotseat.machine import has_gpu
from hotseat.observe import Journal, Monitor
from hotseat.rewards.addresses import METRICS_TOKEN, bearer_token

if TYPE_CHECKING:
    from hotseat.cluster import Cluster, DeviceMemory
    from hotseat.observe.machine_use import DeviceUse
    from hotseat.placement import Plan

D = TypeVar("D")


@contextmanager
def watched(config: Config, run_dir: Path, journal: Journal) -> Iterator[Monitor]:
    """Watch a run until its end, and serve its metrics if the config asks for it."""
    with ExitStack() as stack:
        monitor = Monitor(run_dir, journal.run_progress)
        stack.enter_context(monitor.until_the_end())
        journal.measured = monitor.metrics
        if config.log.endpoint.port is not None:
            _serve(config, run_dir, journal, monitor, stack)
        yield monitor


def _serve(config: Config, run_dir: Path, journal: Journal, monitor: Monitor, stack: ExitStack) -> None:
    """Open the endpoint. A run goes on without it, with a warning, if its port is taken."""
    from hotseat.connections import bound_at
    from hotseat.observe.endpoint import Endpoint

    section = config.log.endpoint
    assert section.port is not None
    try:
        bound = bound_at(section.host, section.port)
    except OSError as error:
        journal.say(
            f"log.endpoint: cannot listen on port {section.port} of {section.host} ({error.strerror or error}), so"
            " nothing is served; another port, or 0 for any that is free, would do",
            kind="warning",
        )
        return
    labels = {"run": run_dir.name, "task": config.task}
    token = bearer_token(name=METRICS_TOKEN)
    progress = journal.run_progress
    stack.enter_context(Endpoint(bound, progress, labels, lambda: monitor.newest, journal.say, token))
    host = f"[{section.host}]" if ":" in section.host else section.host
    monitor.serves_at(f"http://{host}:{bound.getsockname()[1]}")
    journal.say(f"metrics: {monitor.endpoint}/metrics, health: {monitor.endpoint}/healthz")


def devices_of(cluster: Cluster, plan: Plan) -> Mapping[int, DeviceUse]:
    """Return what measures the devices of a run, as far as they are GPUs of the driver's machine."""
    if cluster.is_in_process:
        return devices_here(1)
    devices = {device for role in plan.roles for process in role.processes for device in process.devices}
    measures = (cluster.device_busy, cluster.device_memory)
    return {device: partial(_use, device, *measures) for device in sorted(devices)}


def devices_here(number: int) -> Mapping[int, DeviceUse]:
    """Return what measures so many GPUs of this machine, the first that this process sees; none without GPUs."""
    from hotseat.cluster.device_memory import device_busy, device_memory, own_device_name

    names = {device: own_device_name(device) for device in range(number if has_gpu() else 0)}
    return {device: partial(_use, name, device_busy, device_memory) for device, name in names.items()}


def _use(
    device: D, busy: Callable[[D], float | None], memory: Callable[[D], DeviceMemory | None]
) -> tuple[float | None, int | None]:
    measured = memory(device)
    return busy(device), None if measured is None else measured.used
