"""Processes: groups of plain classes on Ray or in this process, services of nodes, leases on devices."""

from hotseat.cluster.cluster import Cluster
from hotseat.cluster.group import Calling, Pending, WorkerGroup, reports_death
from hotseat.cluster.lease import DeviceMemory, Holder, Leases
from hotseat.cluster.on_ray.template import Template, start_ahead, started_template
from hotseat.cluster.refs import Ref, as_arguments
from hotseat.placement.locate import Process
from hotseat.processes.supervisor import in_worker_process

__all__ = [
    "Calling",
    "Cluster",
    "DeviceMemory",
    "Holder",
    "Leases",
    "Pending",
    "Process",
    "Ref",
    "Template",
    "WorkerGroup",
    "as_arguments",
    "in_worker_process",
    "reports_death",
    "start_ahead",
    "started_template",
]
