"""Worker groups whose methods are called by name, and the handles of such calls."""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hotseat import cluster as machinery
from hotseat.cluster import Pending, Process
from hotseat.errors import PlacementError
from hotseat.rlinf.failures import Call
from hotseat.rlinf.rank_rows import record_size
from hotseat.rlinf.rlinf_cluster import Cluster, WorkerPlace
from hotseat.rlinf.rlinf_placement import PlacementStrategy, default_strategy

_IDLE_GRACE_S = 60.0  # gigabytes cross from a device to the host in it

T = TypeVar("T")


@dataclass(frozen=True)
class GroupSpec(Generic[T]):
    """A worker class and its constructor arguments, not launched yet."""

    cls: type[T]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def launch(
        self,
        cluster: Cluster,
        placement_strategy: PlacementStrategy | None = None,
        name: str | None = None,
        max_concurrency: int | None = None,
        isolate_gpu: bool = True,
        catch_system_failure: bool | None = None,
        disable_distributed_log: bool = False,
    ) -> WorkerGroup[T]:
        """Make a worker in each process that the strategy names.

        Without a strategy each device gets one, or the first node if there are no devices. `catch_system_failure` and
        `disable_distributed_log` have no effect.
        """
        name = name or self.cls.__name__
        if not isolate_gpu:
            raise PlacementError(
                f"{name}: isolate_gpu=False would show every device to every worker; a worker sees its own devices"
                " only: leave isolate_gpu out, and place workers that need more devices with num_hardware_per_process"
            )
        strategy = placement_strategy or default_strategy(cluster.inventory)
        processes = strategy.get_placement(cluster)
        places = [{"hotseat_place": place} for place in _places(name, processes, cluster)]
        launched = cluster.launch(
            name,
            self.cls,
            processes,
            args=self.args,
            kwargs=self.kwargs,
            per_rank=places,
            max_concurrency=max_concurrency,
        )
        record_size(cluster.directory(), name, len(processes))
        group = WorkerGroup(self.cls, launched, cluster)
        cluster.groups[name] = group
        return group


def _places(name: str, processes: Sequence[Process], cluster: Cluster) -> list[WorkerPlace]:
    nodes = [process.node for process in processes]
    return [
        WorkerPlace(
            name,
            process.rank,
            len(processes),
            process.node,
            tuple(process.devices),
            nodes[: process.rank].count(process.node),
            nodes.count(process.node),
            cluster.inventory,
            cluster.directory(),
        )
        for process in processes
    ]


class WorkerGroup(Generic[T]):
    """Workers that are called together: `group.step(batch)` calls `step` on all of them and returns a handle."""

    def __init__(
        self, cls: type[T], group: machinery.WorkerGroup[T], cluster: Cluster, ranks: Sequence[int] | None = None
    ):
        self._cls = cls
        self._group = group
        self._cluster = cluster
        self._ranks = group.ranks if ranks is None else ranks

    @staticmethod
    def from_group_name(cls: type[T], group_name: str) -> WorkerGroup[T]:
        """Return the group of this name that was launched in this program."""
        groups = Cluster().groups
        if group_name not in groups:
            raise PlacementError(f"there is no group {group_name!r}; there are {', '.join(groups) or 'none'}")
        group: WorkerGroup[T] = groups[group_name]
        return group

    @property
    def worker_group_name(self) -> str:
        return self._group.name

    @property
    def world_size(self) -> int:
        return self._group.size

    def execute_on(self, *ranks: int) -> WorkerGroup[T]:
        """Call only these workers, as in `group.execute_on(0, 3).hello()`."""
        return WorkerGroup(self._cls, self._group, self._cluster, self._group.checked_ranks(ranks))

    def close(self, grace_s: float = 1.0) -> None:
        """End the group's processes. Each worker's `close` is called first.

        A worker without a call under way has a minute for it, in which it moves what it has sent and nobody has taken
        from its device to host memory. One with a call under way has `grace_s`; if it does not return by then, whoever
        takes what it has sent gets an error that names it.
        """
        self._group.close(grace_s=grace_s, idle_grace_s=_IDLE_GRACE_S)

    def call(self, method: str, *args: Any, **kwargs: Any) -> WorkerGroupFuncResult:
        pending = self._group.on(*self._ranks).start(getattr(self._cls, method), *args, **kwargs)
        return WorkerGroupFuncResult(self, method, pending)

    def __getattr__(self, name: str) -> Callable[..., WorkerGroupFuncResult]:
        if name.startswith("_"):
            raise AttributeError(name)
        if not callable(getattr(self._cls, name, None)):
            known = [each for each, _ in inspect.getmembers(self._cls, callable) if not each.startswith("_")]
            raise AttributeError(
                f"{self._cls.__name__} has no method {name!r} to call on group {self._group.name!r}; it has"
                f" {', '.join(known)}"
            )

        def start(*args: Any, **kwargs: Any) -> WorkerGroupFuncResult:
            return self.call(name, *args, **kwargs)

        return start


class WorkerGroupFuncResult:
    """The handle of a call to a group: `wait` returns one result per worker that was called, in rank order.

    The failure of a call that nobody waits for is raised by the next wait for any call of the cluster: otherwise
    workers that expect something from the failed one would be waited for until the deadline.
    """

    def __init__(self, group: WorkerGroup[Any], method: str, pending: Pending[Any]):
        self._group = group
        self._method = method
        self._pending = pending
        self._call = Call()
        watch = group._cluster.failures.watch
        self._results = {
            rank: watch(future, functools.partial(group._group.open, rank, method), self._call)
            for rank, future in pending.futures.items()
        }

    def wait(self) -> list[Any]:
        """Wait for all workers and return their results; raise the first failure."""
        failures, waiting = self._group._cluster.failures, set(self._results.values())
        while waiting:
            elsewhere = failures.first
            done, _ = concurrent.futures.wait(
                {*waiting, elsewhere},
                timeout=self._group._group.timeout_s,
                return_when=concurrent.futures.FIRST_COMPLETED,
            )
            if not done:
                return self._pending.result(0.001)  # which says who does not answer
            waiting -= done
            for result in [*(done - {elsewhere}), *(done & {elsewhere} if waiting else ())]:
                if (failure := result.exception()) is not None:
                    failures.report(failure, None if result is elsewhere else self._call)
                    raise failure
        return [self._results[rank].result() for rank in sorted(self._results)]

    async def async_wait(self) -> list[Any]:
        """Do as `wait` does, in a coroutine."""
        import asyncio

        return await asyncio.to_thread(self.wait)

    def done(self) -> bool:
        return self._pending.done()

    def consume_durations(self, reduction_type: str = "max") -> dict[str, float]:
        """Return the seconds of all timers of these workers, reduced by `max`, `min` or `mean`, and set them to 0."""
        self.wait()
        times: list[dict[str, float]] = self._timers().call("pop_execution_times").wait()
        tags = {tag for each in times for tag in each}
        return {tag: _reduced([each[tag] for each in times if tag in each], reduction_type) for tag in sorted(tags)}

    def consume_duration(self, reduction_type: str = "max", return_per_rank: bool = False) -> Any:
        """Return the seconds of the timer that has the called method's name, and set it to 0."""
        self.wait()
        times: list[float] = self._timers().call("pop_execution_time", self._method).wait()
        reduced = _reduced(times, reduction_type)
        return (reduced, times) if return_per_rank else reduced

    def _timers(self) -> WorkerGroup[Any]:
        return self._group.execute_on(*self._pending.ranks)


def _reduced(seconds: Sequence[float], reduction_type: str) -> float:
    reductions: dict[str, Callable[[Sequence[float]], float]] = {
        "max": max,
        "min": min,
        "mean": lambda values: sum(values) / len(values),
    }
    if reduction_type not in reductions:
        raise ValueError(f"reduction_type is {reduction_type!r}; it can be {', '.join(reductions)}")
    return reductions[reduction_type](seconds)
