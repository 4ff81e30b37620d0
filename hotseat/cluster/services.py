"""Processes that serve all others of a cluster, one of a kind for each node: started when first asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

Address_co = TypeVar("Address_co", covariant=True)


class NodeService(Protocol[Address_co]):
    """A process on a node. Making an object of the class starts the process; it has to end when its parent does.

    `Cluster.service` takes the class, which has to be importable on all nodes.
    """

    def __init__(self, directory: str, *, host: str | None, env: dict[str, str]):
        """Start the process. directory: for its files. host: to be reached at by other machines; None: by none."""

    @property
    def address(self) -> Address_co:
        """Return how processes of the cluster reach it, as a value that can be pickled."""

    def close(self) -> None:
        """End the process."""

    @staticmethod
    def disconnect(address: Any) -> None:
        """Close this process's connections to one that has ended."""


class NodeServices:
    """The services of the node that this process is on."""

    def __init__(self, directory: str, env: Mapping[str, str]):
        self._directory = directory
        self._env = dict(env)
        self._started: dict[type[NodeService[Any]], NodeService[Any]] = {}

    def address(self, service: type[NodeService[Address_co]], host: str | None) -> Address_co:
        """Return the address of a service, which is started when first asked for."""
        if service not in self._started:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            self._started[service] = service(self._directory, host=host, env=self._env)
        return self._started[service].address

    def close(self) -> None:
        """End all services of this node."""
        for service in self._started.values():
            service.close()
