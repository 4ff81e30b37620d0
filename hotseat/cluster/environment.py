"""The environment variables of this process: set for a while, or passed on to workers on other machines."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence

from hotseat.placement.locate import Process


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables while the context lasts."""
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        restore_environment(before)


def restore_environment(before: Mapping[str, str | None]) -> None:
    """Set variables back to earlier values; None removes one."""
    for key, value in before.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


def rank_env(processes: Sequence[Process], rank: int, address: str, port: int) -> dict[str, str]:
    """Return the variables by which a rank of `processes` finds the others, which meet at the address."""
    node = processes[rank].node
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(processes)),
        "LOCAL_RANK": str(sum(other.node == node for other in processes[:rank])),
        "LOCAL_WORLD_SIZE": str(sum(other.node == node for other in processes)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


_PASSED_ON = "HOTSEAT_PASSED_ON"


def pass_on_nccl() -> dict[str, str]:
    """Return the variable by which workers get this process's `NCCL_*`; none if there are none.

    On a cluster that exists, workers have the environment with which Ray was started on their node.
    """
    variables = {key: value for key, value in sorted(os.environ.items()) if key.startswith("NCCL_")}
    return {_PASSED_ON: json.dumps(variables)} if variables else {}


def take_passed_on() -> None:
    """Set the variables that the driver passed on, unless they are set on this node: interfaces may differ there."""
    for key, value in json.loads(os.environ.pop(_PASSED_ON, "{}")).items():
        os.environ.setdefault(key, value)
