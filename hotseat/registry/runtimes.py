"""Runtimes, which run the processes of a run, and the facts by which other code decides."""

from __future__ import annotations

from dataclasses import dataclass

from hotseat.registry.lookup import Table


@dataclass(frozen=True)
class RuntimeEntry:
    """Facts about a runtime."""

    name: str  # of `cluster.runtime`
    summary: str  # for the docs
    opener: str  # "module:attribute" of what makes a `cluster.runtime.Runtime` of a session and `RuntimeOptions`
    is_in_process: bool = False  # all objects live in the process that opens it


DEFAULT_RUNTIME = "ray"

RUNTIMES = Table[RuntimeEntry](
    "runtime",
    RuntimeEntry("ray", "Actors of Ray, on one node or many.", "hotseat.cluster.on_ray.ray_runtime:open_runtime"),
    RuntimeEntry("local", "Objects in this process.", "hotseat.cluster.local:open_runtime", is_in_process=True),
)

runtime_entry = RUNTIMES.entry
