"""The placement group that reserves the devices of all groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotseat.closing import on_failure
from hotseat.cluster import activity
from hotseat.cluster.device_memory import own_device_name
from hotseat.cluster.environment import pass_on
from hotseat.cluster.on_ray.connection import RayConnection
from hotseat.cluster.session import Session, activity_folder
from hotseat.errors import PlacementError

_ANSWER_TIMEOUT_S = 60.0


class Reservation:
    """Reserved devices: each node's bundle of the placement group, and the physical device behind each of our numbers.

    devices: those to reserve on each node, by our numbers. first: the number of each node's first device.
    """

    def __init__(
        self,
        connection: RayConnection,
        session: Session,
        devices: Mapping[int, Sequence[int]],
        first: Sequence[int],
        timeout_s: float,
    ):
        self._connection = connection
        self._session = session
        self._group: Any = None
        self._bundles: dict[int, int] = {rank: index for index, rank in enumerate(sorted(devices))}
        self._names: dict[int, str] = {}  # by our number: what CUDA_VISIBLE_DEVICES calls a device
        self._make_placement_group(devices, timeout_s)
        with on_failure(self.release):
            for rank in self._bundles:
                numbers = sorted(devices[rank])
                if connection.is_own:
                    names = [own_device_name(number - first[rank]) for number in numbers]
                else:
                    names = self._physical(rank, len(numbers))
                self._names.update(zip(numbers, names, strict=True))

    def device_name(self, device: int) -> str | None:
        """Return what CUDA_VISIBLE_DEVICES calls a device; None if it is not reserved."""
        return self._names.get(device)

    def missing(self, node: int, devices: Sequence[int]) -> list[int] | str:
        """Return what is not reserved of these devices, or of the node itself; empty if all is."""
        return [device for device in devices if device not in self._names] or (
            "" if node in self._bundles else "the node"
        )

    def options(self, node: int, env: Mapping[str, str]) -> dict[str, Any]:
        """Return the options of a Ray actor on this node that has these environment variables."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self._bundles[node]
        )
        session, is_home = self._session, node == self._connection.home
        activity_env = {
            activity.DIRECTORY: activity_folder(session.directory if is_home else session.directory_on(node))
        }
        passed_on = {} if self._connection.is_own else pass_on(self._connection.nodes[node].address).env()
        return {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": {**self._session.env(), **activity_env, **passed_on, **env}},
        }

    def release(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)

    def _make_placement_group(self, devices: Mapping[int, Sequence[int]], timeout_s: float) -> None:
        from ray.util.placement_group import placement_group, remove_placement_group

        nodes, order = self._connection.nodes, sorted(devices)
        bundles = [
            {"GPU": len(devices[rank])} if devices[rank] else {f"node:{nodes[rank].address}": 0.001} for rank in order
        ]
        self._group = placement_group(
            bundles,
            strategy="PACK",
            bundle_label_selector=[{"ray.io/node-id": nodes[rank].id} for rank in order],
        )
        if not self._group.wait(timeout_s):
            free = self._connection.ray.available_resources()
            remove_placement_group(self._group)
            request = ", ".join(f"node {rank}: {len(devices[rank])} devices" for rank in order)
            raise PlacementError(
                f"could not reserve {request} in {timeout_s:.0f} s: Ray has {free.get('GPU', 0):g} devices free; wait"
                " for other jobs to end, or place the roles on fewer devices"
            )

    def _physical(self, rank: int, count: int) -> list[str]:
        """Ask which devices Ray set aside in this node's bundle: other jobs may have the first ones."""
        if not count:
            return []
        ray = self._connection.ray
        options = self.options(rank, {}) | {"num_gpus": count}
        ref = ray.remote(_visible_devices).options(**options).remote()
        try:
            names = [str(name) for name in ray.get(ref, timeout=_ANSWER_TIMEOUT_S)]
        except ray.exceptions.RayError as error:
            raise PlacementError(f"node {rank} did not say which devices were reserved on it: {error}") from error
        return sorted(names, key=lambda name: (len(name), name))


def _visible_devices() -> list[Any]:
    import ray

    return ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
