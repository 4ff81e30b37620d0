"""Processes: groups of plain classes on Ray or in this process, channels between them, leases on devices."""

from hotseat.cluster._guard import in_worker_process
from hotseat.cluster.channel import Channel, ChannelClosed
from hotseat.cluster.cluster import Cluster, Node
from hotseat.cluster.group import Group, Pending, Process, Ref, Worker, create_group
from hotseat.cluster.lease import DeviceMemory, HandOver, Holder, Lease, LeaseError, Leases

__all__ = [
    "Channel",
    "ChannelClosed",
    "Cluster",
    "DeviceMemory",
    "Group",
    "HandOver",
    "Holder",
    "Lease",
    "LeaseError",
    "Leases",
    "Node",
    "Pending",
    "Process",
    "Ref",
    "Worker",
    "create_group",
    "in_worker_process",
]
