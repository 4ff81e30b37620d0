"""Groups launched in the way that RLinf users know: `Actor.create_group(cfg).launch(cluster, name="actor")`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from hotseat.cluster.cluster import Cluster
from hotseat.cluster.group import WorkerGroup

__all__ = ["GroupSpec", "Worker", "create_group"]

T = TypeVar("T")


@dataclass(frozen=True)
class GroupSpec(Generic[T]):
    """A class and its constructor arguments, not yet anywhere."""

    cls: type[T]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def launch(
        self, cluster: Cluster, name: str | None = None, placement_strategy: Any = 1, **options: Any
    ) -> WorkerGroup[T]:
        """Call `Cluster.launch`, with a strategy that has `processes`, or with the processes themselves."""
        name = name or self.cls.__name__
        return cluster.launch(
            name, self.cls, args=self.args, kwargs=self.kwargs, processes=placement_strategy, **options
        )


def create_group(cls: type[T], *args: Any, **kwargs: Any) -> GroupSpec[T]:
    """Make a spec of any plain class: `create_group(Actor, cfg).launch(cluster, placement_strategy=...)`."""
    return GroupSpec(cls, args, kwargs)


class Worker:
    """Optional base of a worker class: `Actor.create_group(cfg).launch(cluster, name=, placement_strategy=)`."""

    @classmethod
    def create_group(cls, *args: Any, **kwargs: Any) -> GroupSpec[Self]:
        return GroupSpec(cls, args, kwargs)
