"""Stand-ins for the engines, trainers and machines of a large cluster, as entries of the registry.

`register` adds them; a config then names them: `cluster.runtime: simulated`, `rollout.engine: simulated` and
`train.backend: simulated`. Everything else of a run is the product's own: planner, driver, Ray, rollout hosts, rewards,
and the workers of every role, each with a stand-in behind the contract of its engine or backend.
"""

from __future__ import annotations

from hotseat.registry.backends import BACKENDS, BackendEntry
from hotseat.registry.engines import ENGINES, EngineEntry
from hotseat.registry.runtimes import RUNTIMES, RuntimeEntry

NAME = "simulated"


def register() -> None:
    """Add the stand-ins to the tables of this process."""
    ENGINES[NAME] = EngineEntry(
        NAME,
        "a stand-in",
        "Answers of random lengths, in the time that an engine takes.",
        f"{__name__}.engine:SimulatedKind",
        options=frozenset({"num_slots", "tensor_parallel_size"}),
    )
    BACKENDS[NAME] = BackendEntry(
        NAME, "a stand-in", "Updates that take time.", f"{__name__}.backend:SimulatedBackend", shards_by_layer=True
    )
    RUNTIMES[NAME] = RuntimeEntry(NAME, "Many ranks in few processes.", f"{__name__}.machines:open_runtime")
