"""RLinf's `Worker`: a class whose objects run in processes of a group, and talk to each other."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from hotseat.cluster import in_worker_process
from hotseat.cluster.ports import free_port
from hotseat.errors import RunError, UserError
from hotseat.rlinf.channel import Channel, Post, QueueSpec, leave_all, post_of
from hotseat.rlinf.keys import key_text
from hotseat.rlinf.queues import Queue
from hotseat.rlinf.rank_rows import group_size, merge, num_rows, parts_to_receive, parts_to_send, split
from hotseat.rlinf.rlinf_cluster import WorkerPlace, set_current_place
from hotseat.rlinf.work import AsyncRouteWork
from hotseat.rlinf.worker_group import GroupSpec

W = TypeVar("W", bound="Worker")
F = TypeVar("F", bound=Callable[..., Any])


class WorkerMeta(type):
    """Gives a worker its place before the constructor runs, so that a constructor can use rank and channels."""

    def __call__(cls, *args: Any, hotseat_place: WorkerPlace | None = None, **kwargs: Any) -> Any:
        worker: Any = cls.__new__(cls, *args, **kwargs)  # type: ignore[arg-type]
        if isinstance(worker, Worker):
            worker._enter(hotseat_place)
        worker.__init__(*args, **kwargs)
        return worker


class Worker(metaclass=WorkerMeta):
    """Base of worker classes: `MyWorker.create_group(...).launch(cluster, name=, placement_strategy=)`.

    In its process a worker has the variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, so
    `torch.distributed.init_process_group` connects the workers of its group. It sees its own devices only.
    """

    current_worker: ClassVar[Worker | None] = None  # in a process of a group

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what RLinf's constructor takes for workers outside of a group; it has no effect."""

    @classmethod
    def create_group(cls: type[W], *args: Any, **kwargs: Any) -> GroupSpec[W]:
        """Return a group to launch, whose workers are made with these arguments."""
        return GroupSpec(cls, args, kwargs)

    def _enter(self, place: WorkerPlace | None) -> None:
        self._timer_metrics: dict[str, float] = {}
        self._held: DeviceLock | None = None
        self._group_sizes: dict[str, int] = {}
        self._place_or_none = place
        if place is None:
            return
        self._rank = place.rank
        self._world_size = place.world_size
        self._group_name = place.group
        self._worker_name = f"{place.group}:{place.rank}"
        self._cluster_node_rank = place.node
        self._node_local_rank = place.node_rank
        self._node_local_world_size = place.node_world_size
        self._local_accelerator_rank = (
            place.devices[0] - place.inventory.first_devices[place.node] if place.devices else -1
        )
        # A worker sees its own devices only, numbered from 0.
        self._local_rank, self._local_world_size = 0, 1
        self._logger = _logger(self._worker_name)
        if in_worker_process():
            Worker.current_worker = self
            set_current_place(place)
            os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", CLUSTER_NODE_RANK=str(place.node))

    @property
    def _place(self) -> WorkerPlace:
        place = self._place_or_none
        if place is None:
            raise RunError(f"{type(self).__name__} belongs to no group: make it by create_group(...).launch(cluster)")
        return place

    @property
    def _post(self) -> Post:
        return post_of(self._place.directory)

    def close(self) -> None:
        """Leave all channels. Called when the group is closed; an override has to call it."""
        if self._place_or_none is not None and in_worker_process():
            leave_all()

    def __repr__(self) -> str:
        return f"{self._place.group}(rank={self._place.rank})"

    # --- devices --------------------------------------------------------------------------------------------------

    @property
    def has_accelerator(self) -> bool:
        return bool(self._place.devices)

    @property
    def global_accelerator_ids(self) -> list[int]:
        """Return this worker's devices by their number in the cluster."""
        return list(self._place.devices)

    @property
    def torch_device_type(self) -> str:
        """Return `cuda` or `cpu`."""
        import torch

        return "cuda" if self.has_accelerator and torch.cuda.is_available() else "cpu"

    @property
    def torch_platform(self) -> Any:
        """Return `torch.cuda` or `torch.cpu`."""
        import torch

        return getattr(torch, self.torch_device_type)

    @property
    def device_lock(self) -> DeviceLock:
        """Return the lock of this worker's devices: `with self.device_lock: ...`. May be taken again inside."""
        if self._held is None:
            self._held = DeviceLock(self._post, self._place.devices)
        return self._held

    def acquire_free_port(self) -> int:
        return free_port("127.0.0.1")

    # --- messages -------------------------------------------------------------------------------------------------

    def send(
        self,
        object: Any,
        dst_group_name: str,
        dst_rank: int | Sequence[int],
        async_op: bool = False,
        options: Any = None,
        piggyback_payload: Any = None,
    ) -> Any:
        """Send an object to a worker of a group. Returns when it waits there, whether or not it was received.

        CUDA tensors in it stay on the device for a receiver on the same one; see docs/rlinf.md.
        """
        mail = _mail(self._group_name, self._rank, dst_group_name, _one_rank("dst_rank", dst_rank))
        return self._post.put(mail, (object, piggyback_payload), is_async=async_op)

    def recv(
        self, src_group_name: str, src_rank: int | Sequence[int], async_op: bool = False, options: Any = None
    ) -> Any:
        """Receive the next object of a worker; with a payload, the pair of both. Objects of one sender keep order."""
        return self._receive(
            _mail(src_group_name, _one_rank("src_rank", src_rank), self._group_name, self._rank), async_op
        )

    def _receive(self, mail: QueueSpec, is_async: bool) -> Any:
        def take(queue: Queue) -> Any:
            received, payload = queue.get()
            return received if payload is None else (received, payload)

        return self._post.get(mail, take, is_async=is_async)

    def send_tensor(
        self, tensor: Any, dst_group_name: str, dst_rank: int, async_op: bool = False, options: Any = None
    ) -> Any:
        """Send a tensor to a worker that calls `recv_tensor`."""
        return self.send(tensor, dst_group_name, dst_rank, async_op)

    def recv_tensor(
        self, tensor: Any, src_group_name: str, src_rank: int, async_op: bool = False, options: Any = None
    ) -> Any:
        """Receive a tensor into this one, which has its shape and type."""
        mail = _mail(src_group_name, src_rank, self._group_name, self._rank)
        return self._post.get(mail, lambda queue: tensor.copy_(queue.get()[0]), is_async=async_op)

    def broadcast(
        self,
        object: Any = None,
        groups: Sequence[tuple[str, int | Sequence[int]]] = (),
        src: tuple[str, int] | None = None,
        async_op: bool = False,
        options: Any = None,
    ) -> Any:
        """Have one worker's object on all these workers; all of them call it. src: by default the first of them."""
        members = [(group, rank) for group, ranks in groups for rank in ([ranks] if isinstance(ranks, int) else ranks)]
        if src is None:
            src = members[0]
        if (self._group_name, self._rank) != src:
            return self.recv(*src, async_op=async_op)
        works = [self.send(object, *member, async_op=True) for member in dict.fromkeys(members) if member != src]
        last = self._post.put(_mail(*src, *src), (object, None), is_async=True)
        received = self.recv(*src, async_op=True)
        if async_op:
            return received
        for work in [*works, last]:
            assert work is not None
            work.wait()
        return received.wait()

    # --- batches from group to group ------------------------------------------------------------------------------

    def send_to(
        self,
        group_name: str,
        channel: Channel | None,
        data: Any,
        *,
        route_key: Any = None,
        mode: str | None = None,
        tag: str | None = None,
        async_op: bool = False,
        batch_size: int | None = None,
        split_fn: Callable[[Any, list[int]], list[Any]] | None = None,
        enable_p2p: bool = False,
        options: Any = None,
        decoupled_mode: bool = False,
        send_queue_size: int = 0,
    ) -> AsyncRouteWork | None:
        """Send this worker's rows of a batch to the workers of a group, whose shares of the batch are equal.

        All workers of this group call it, and all of the other `recv_from`. data: a tensor, an array, a list or a dict
        of them. batch_size: rows of all senders together; by default this worker's times their number. tag, route_key:
        keep streams apart, and are the same in `recv_from`; with `mode` the tag is MODE_TAG. enable_p2p: by messages,
        without a channel; those without tag and route_key come in turn with those of `send`.
        """
        self._check_route("send_to", channel, enable_p2p, decoupled_mode)
        total = num_rows(data) * self._world_size if batch_size is None else batch_size
        parts = parts_to_send(total, self._world_size, self._size_of(group_name), self._rank)
        sizes = [part.num_rows for part in parts]
        shards = split(data, sizes) if split_fn is None else split_fn(data, sizes)
        if len(shards) != len(parts):
            raise UserError(f"split_fn returned {len(shards)} parts for the sizes {sizes}")
        tag = tag if mode is None else f"{mode}_{tag}"
        works: list[Any] = []
        for part, shard in zip(parts, shards, strict=True):
            if enable_p2p:
                mail = _mail(self._group_name, self._rank, group_name, part.rank, tag, route_key)
                works.append(self._post.put(mail, (shard, None), is_async=async_op))
            else:
                assert channel is not None
                key = _route(self._group_name, group_name, tag, route_key, self._rank, part.rank)
                works.append(channel.put(shard, key=key, async_op=async_op))
        return AsyncRouteWork(works, lambda _: None) if async_op else None

    def recv_from(
        self,
        group_name: str,
        channel: Channel | None,
        *,
        route_key: Any = None,
        tag: str | None = None,
        async_op: bool = False,
        batch_size: int | None = None,
        merge_fn: Callable[[list[Any]], Any] | None = None,
        infer_batch_size_fn: Callable[[Any], int] | None = None,
        enable_p2p: bool = False,
        options: Any = None,
        decoupled_mode: bool = False,
        recv_queue_size: int = 0,
    ) -> Any:
        """Receive this worker's share of a batch that the workers of a group send by `send_to`.

        batch_size: rows of all receivers together, which has to be set. infer_batch_size_fn: counts rows, by which
        every part is checked. merge_fn: puts the parts together, in the order of the senders' ranks.
        """
        self._check_route("recv_from", channel, enable_p2p, decoupled_mode)
        if batch_size is None:
            raise UserError("recv_from needs batch_size, the rows that all workers of this group receive together")
        parts = parts_to_receive(batch_size, self._size_of(group_name), self._world_size, self._rank)

        def take(rank: int) -> Any:
            if enable_p2p:
                return self._receive(_mail(group_name, rank, self._group_name, self._rank, tag, route_key), async_op)
            assert channel is not None
            key = _route(group_name, self._group_name, tag, route_key, rank, self._rank)
            return channel.get(key=key, async_op=async_op)

        def put_together(shards: list[Any]) -> Any:
            for part, shard in zip(parts, shards, strict=True):
                received = (infer_batch_size_fn or num_rows)(shard)
                if received != part.num_rows:
                    raise RunError(
                        f"{group_name}[{part.rank}] sent {received} rows to {self._group_name}[{self._rank}], which"
                        f" expects {part.num_rows} of batch_size {batch_size}: both sides have to name the same, and"
                        " workers that have exchanged batches with a group know the size that it had then"
                    )
            return merge(shards) if merge_fn is None else merge_fn(shards)

        shards = [take(part.rank) for part in parts]
        return AsyncRouteWork(shards, put_together) if async_op else put_together(shards)

    def _size_of(self, group: str) -> int:
        if group not in self._group_sizes:
            self._group_sizes[group] = group_size(self._place.directory, group)
        return self._group_sizes[group]

    @staticmethod
    def _check_route(method: str, channel: Channel | None, is_direct: bool, is_decoupled: bool) -> None:
        if is_decoupled:
            raise UserError(
                f"{method}: decoupled_mode is not here; have senders put (rank, rows) into a channel, any worker take"
                " them, and put its answer under the rank as key"
            )
        if channel is None and not is_direct:
            raise UserError(f"{method} needs a channel, or enable_p2p=True")

    # --- channels -------------------------------------------------------------------------------------------------

    def create_channel(self, channel_name: str, maxsize: int = 0, **_: Any) -> Channel:
        """Create a channel, or connect to the one of this name."""
        return Channel.create_in(self._place.directory, channel_name, maxsize)

    def connect_channel(self, channel_name: str) -> Channel:
        """Connect to a channel that was created elsewhere, or will be soon."""
        return Channel.connect_in(self._place.directory, channel_name)

    # --- log and time ---------------------------------------------------------------------------------------------

    def log_debug(self, msg: object) -> None:
        self._logger.debug(msg, stacklevel=2)

    def log_info(self, msg: object) -> None:
        self._logger.info(msg, stacklevel=2)

    def log_warning(self, msg: object) -> None:
        self._logger.warning(msg, stacklevel=2)

    def log_error(self, msg: object) -> None:
        self._logger.error(msg, stacklevel=2)

    def log_on_first_rank(self, msg: object) -> None:
        if self._rank == 0:
            self._logger.info(msg, stacklevel=2)

    @contextlib.contextmanager
    def worker_timer(self, tag: str | None = None) -> Iterator[None]:
        """Add the time spent inside to the timer `tag`, by default the name of the calling function."""
        tag = tag or inspect.stack()[2].function
        started = time.perf_counter()
        try:
            yield
        finally:
            self._timer_metrics[tag] = self._timer_metrics.get(tag, 0.0) + time.perf_counter() - started

    @staticmethod
    def timer(tag: str | None = None) -> Callable[[F], F]:
        """Time a worker's method, as `worker_timer` does."""

        def decorate(method: F) -> F:
            if inspect.iscoroutinefunction(method):

                @functools.wraps(method)
                async def timed(self: Worker, *args: Any, **kwargs: Any) -> Any:
                    with self.worker_timer(tag or method.__name__):
                        return await method(self, *args, **kwargs)

            else:

                @functools.wraps(method)
                def timed(self: Worker, *args: Any, **kwargs: Any) -> Any:
                    with self.worker_timer(tag or method.__name__):
                        return method(self, *args, **kwargs)

            return timed  # type: ignore[return-value]

        return decorate

    def pop_execution_time(self, tag: str) -> float:
        """Return the seconds of a timer, and set it to 0."""
        if tag not in self._timer_metrics:
            raise ValueError(f"there is no timer {tag!r}; there are {', '.join(self._timer_metrics) or 'none'}")
        return self._timer_metrics.pop(tag)

    def pop_execution_times(self) -> dict[str, float]:
        """Return the seconds of all timers, and set them to 0."""
        times, self._timer_metrics = self._timer_metrics, {}
        return times


class DeviceLock:
    """The right to a worker's devices, for one worker at a time, in the order in which they ask.

    If a process ends that holds the lock, whoever waits for it gets an error that names the process. Devices are
    locked in ascending order, so two workers with several devices never wait for each other.
    """

    def __init__(self, post: Post, devices: Sequence[int]):
        self._locks = [post.queue(f"lock of device {device}", 1) for device in sorted(devices)]
        self._depth = 0

    def acquire(self) -> None:
        if self._depth == 0:
            for lock in self._locks:
                lock.get()
        self._depth += 1

    def release(self) -> None:
        if self._depth == 0:
            raise RunError("the device lock was released but is not held")
        self._depth -= 1
        if self._depth == 0:
            for lock in reversed(self._locks):
                lock.put(None)
                lock.leave()  # now the end of this process does not concern the others

    def __enter__(self) -> DeviceLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _one_rank(name: str, rank: int | Sequence[int]) -> int:
    """Return a worker's rank, which RLinf also writes as a list: several entries lead to the child of a worker."""
    if isinstance(rank, int):
        return rank
    if len(rank) != 1:
        raise UserError(f"{name} is {list(rank)}: there are no child workers here; name one rank, or call broadcast")
    return rank[0]


def _mail(
    src_group: str, src_rank: int, dst_group: str, dst_rank: int, tag: str | None = None, route_key: Any = None
) -> QueueSpec:
    """Return the queue of messages from one worker to another; those with a tag or a key have one of their own."""
    name = f"from {src_group}[{src_rank}] to {dst_group}[{dst_rank}]"
    if tag is None and route_key is None:
        return QueueSpec(name, stays=True)
    return QueueSpec(f"{name}, tag {key_text(tag)}, route_key {key_text(route_key)}")


def _route(src_group: str, dst_group: str, tag: str | None, route_key: Any, src_rank: int, dst_rank: int) -> Any:
    return "route", src_group, dst_group, tag, route_key, src_rank, dst_rank


def _logger(name: str) -> logging.Logger:
    logger = logging.getLogger(f"hotseat.rlinf.{name}")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter(f"[%(levelname)s %(asctime)s {name}] %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(os.environ.get("RLINF_LOG_LEVEL", "INFO").upper())
        logger.propagate = False
    return logger
