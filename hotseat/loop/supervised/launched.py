"""Supervised run of ranks that a launcher started: no cluster, no driver; the first rank leads, writes and prints."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from hotseat.cluster import Holder, Pending, WorkerGroup
from hotseat.cluster.group import Arguments
from hotseat.config import Config
from hotseat.config.precision import with_dtype
from hotseat.config.presence import has_reference
from hotseat.errors import HotseatError, RunError, UserError
from hotseat.loop.inputs import supervised_inputs
from hotseat.loop.opening import OpenRun, are_budgets_tried, for_devices, open_run, push_model, stoppable
from hotseat.loop.state.saving import Saver, for_ranks
from hotseat.loop.state.watched import devices_here
from hotseat.loop.supervised.supervised_loop import columns, train_and_export, worker_arguments
from hotseat.loop.supervised.supervised_worker import SupervisedWorker
from hotseat.loop.workers.folder_proof import FolderProof, witness
from hotseat.machine import has_gpu
from hotseat.observe import LiveView, NullJournal
from hotseat.placement import GIB, DeviceKind, Inventory, Node
from hotseat.planning.budgets import ChosenBudgets, are_layers_chosen, with_budgets_of
from hotseat.planning.config_plan import is_offloaded, make_plan, with_budgets

AGAIN = "start it again with checkpoint.resume=true"
Result = TypeVar("Result")


class LaunchedRanks(WorkerGroup[SupervisedWorker]):
    """Ranks that a launcher started, as a group that the first of them drives.

    All ranks enter `led`. There the first rank runs code that only one process may run, and calls methods of all ranks;
    the others serve its calls until it is done. They raise what it raises, except for failures inside a call: in these
    each rank has an error of its own, or notices that the connection to the failed one is closed.

    saver: this rank's, which knows of signals. must_stop: some rank got a signal to stop, as far as the last call has
    shown: signals reach ranks at different moments.
    """

    name = "actor"

    def __init__(self, worker: SupervisedWorker, rank: int, num_ranks: int, timeout_s: float):
        self.timeout_s = timeout_s
        self.is_first = rank == 0
        self.saver: Saver | None = None
        self.must_stop = False
        self._worker = worker
        self._num_ranks = num_ranks
        self._has_failed_in_call = False

    def led(self, do: Callable[[], Result]) -> Result:
        """Run `do` on the first rank alone, and return its result on every rank. All ranks call it."""
        if not self.is_first:
            return self._follow()
        try:
            result = do()
        except BaseException as error:
            if not self._has_failed_in_call:
                self._share(("error", _sent(error)), "tell the other ranks")
            raise
        self._share(("result", result), "tell the other ranks")
        return result

    def _follow(self) -> Any:
        while True:
            kind, message = self._share(None, "hear from the first rank")[0]
            if kind == "error":
                raise message
            if kind == "result":
                return message
            self._run(*message)

    def _start(self, method: str, arguments: Arguments, timeout_s: float, keep: int | None = None) -> Pending[Any]:
        """Call a method here, and on the other ranks too unless the first is called alone."""
        args, kwargs = arguments[0]
        if len(arguments) < self._num_ranks:
            results = [getattr(self._worker, method)(*args, **kwargs)]
        else:
            self._share(("call", (method, args, kwargs)), "tell the other ranks")
            results = self._run(method, args, kwargs)
        futures: dict[int, Future[Any]] = {rank: Future() for rank in arguments}
        for future, result in zip(futures.values(), results, strict=True):
            future.set_result(result)
        return Pending(self, method, futures, timeout_s)

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        try:
            result = getattr(self._worker, method)(*args, **kwargs)
        except BaseException:
            self._has_failed_in_call = True
            raise
        facts = self._share((result, self.saver is not None and self.saver.is_stopping), f"end {method!r}")
        self.must_stop = any(must_stop for _, must_stop in facts)
        return [each for each, _ in facts]

    def _share(self, fact: Any, what: str) -> list[Any]:
        """Gather every rank's fact, in rank order. The other ranks no longer listen where that has failed."""
        try:
            return self._worker.share(fact, what)
        except BaseException:
            self._has_failed_in_call = True
            raise

    @property
    def ranks(self) -> range:
        return range(self._num_ranks)

    def states(self) -> list[str]:
        return ["running"] * self._num_ranks

    def holders(self) -> tuple[Holder, ...]:
        return ()

    def restart(self, rank: int) -> NoReturn:
        raise RunError(f"rank {rank} was started by a launcher, which alone can start it again")

    def restart_all(self) -> NoReturn:
        raise RunError("the ranks were started by a launcher, which alone can start them again")

    def close(self, *, grace_s: float = 5.0, idle_grace_s: float = 0.0) -> None:
        self._worker.close()

    def open(self, rank: int, method: str, future: Future[Any]) -> Any:
        return future.result()

    def describe(self, rank: int) -> str:
        return "was started by a launcher"


def _sent(error: BaseException) -> BaseException:
    """Return an error to send to the other ranks: of the same type if it is one of ours, else a `RunError`."""
    if isinstance(error, HotseatError | KeyboardInterrupt):
        return type(error)(*error.args)
    return RunError(f"the first rank failed: {type(error).__name__}: {error}")


def run_launched(config: Config, view: LiveView) -> dict[str, float]:
    """Run a supervised config to its end, as one rank of several."""
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not are_layers_chosen(config):
        raise UserError(
            "train.checkpointed_layers: auto: ranks that a launcher started load their models before they could agree"
            " on a number: set one, or start the run with `hotseat run`"
        )
    inputs = supervised_inputs(config, num_ranks)
    config = with_dtype(config, has_gpu())  # a checkpoint with another dtype is refused, by this key
    view.stage(f"loading {Path(config.actor.model or '').name} in {num_ranks} {'ranks' if num_ranks > 1 else 'rank'}")
    with _folder_proof(config, rank, num_ranks) as proof:
        worker = SupervisedWorker(
            *worker_arguments(config, inputs.algebra, inputs.data, _is_reference_offloaded(config, num_ranks)),
            rank=rank // config.train.num_model_parallel,
            num_ranks=inputs.algebra.num_ranks,
            folder_proof=proof,
        )
    ranks = LaunchedRanks(worker, rank, num_ranks, config.cluster.call_timeout_s)
    try:
        known = worker.share(_memory_gib(), "compare the memory of devices")
        memory_gib = min((gib for gib in known if gib is not None), default=None)  # budgets are for the smallest device
        with ExitStack() as stack:

            def begin() -> tuple[OpenRun, bool]:
                run = stack.enter_context(open_run(config, inputs, columns(inputs.data), view, AGAIN))
                if run.evaluation is not None:
                    return run, False
                if run.monitor is not None:
                    run.monitor.watch_devices(devices_here(int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))))
                has_gpus = memory_gib is not None
                chosen, is_new = for_devices(run, has_gpus, lambda config: _budgets(config, num_ranks, memory_gib))
                return replace(run, config=chosen), is_new

            run, has_new_budgets = _opened(config, ranks, begin, stack)
            if run.evaluation is not None:
                return run.evaluation
            ranks.saver = run.saver
            is_tried = has_new_budgets and are_budgets_tried(memory_gib is not None)
            evaluation = train_and_export(run, inputs, ranks, run.config, is_tried, ranks.led, lambda: ranks.must_stop)
            if ranks.is_first:
                push_model(run)
            return evaluation
    finally:
        worker.close()


@contextmanager
def _folder_proof(config: Config, rank: int, num_ranks: int) -> Iterator[FolderProof | None]:
    """Have the first rank witness that the others see the folder of checkpoints; None: they need not."""
    folder = Path(config.checkpoint.folder or config.run_dir)
    # All ranks, and no other job at the same time, have this address.
    job = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")]
    name = f".proof-{hashlib.blake2b(repr(job).encode(), digest_size=8).hexdigest()}"
    if num_ranks == 1 or not config.checkpoint.is_used:
        yield None
    elif rank > 0:
        # The first rank may still be reading the data.
        yield FolderProof(for_ranks(folder), name, appears_s=config.cluster.call_timeout_s)
    else:
        with witness(folder, name) as proof:
            yield proof


def _opened(
    config: Config, ranks: LaunchedRanks, begin: Callable[[], tuple[OpenRun, bool]], stack: ExitStack
) -> tuple[OpenRun, bool]:
    """Open the run on the first rank; give the others its config, directory, checkpoint, evaluation and new budgets."""
    opened: list[tuple[OpenRun, bool]] = []

    def first() -> tuple[Any, ...]:
        opened.append(begin())
        run, has_new_budgets = opened[0]
        return run.config, run.run_dir, run.checkpoint, run.evaluation, has_new_budgets

    config, run_dir, checkpoint, evaluation, has_new_budgets = ranks.led(first)
    if opened:
        return opened[0]
    saver = Saver(config, run_dir)
    stack.enter_context(stoppable()).append(saver)
    return OpenRun(config, run_dir, saver, checkpoint, NullJournal(), evaluation), has_new_budgets


def _memory_gib() -> float | None:
    """Return the memory of this rank's device; None without a GPU."""
    return torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else None


def _on_launched(config: Config, num_ranks: int, memory_gib: float | None) -> tuple[Config, Inventory | None]:
    """Return the config placed on a device per rank, and these devices; without GPUs, None."""
    inventory = None
    if memory_gib is not None:
        inventory = Inventory((Node(0, num_devices=num_ranks, device_kind=DeviceKind("GPU", memory_gib)),))
    alone: dict[str, Any] = {
        "component_placement": {"actor": f"0-{num_ranks - 1}"},
        "num_nodes": None,
        "node_groups": [],
        "inventory": None,
    }
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=alone)}), inventory


def _is_reference_offloaded(config: Config, num_ranks: int) -> bool:
    """Tell whether a plan for the launched ranks has the reference off their devices while the actor learns."""
    if not has_reference(config):
        return False
    placed, inventory = _on_launched(config, num_ranks, _memory_gib())
    return is_offloaded(make_plan(placed, inventory, are_devices_logical=inventory is None), "reference")


def _budgets(config: Config, num_ranks: int, memory_gib: float | None) -> ChosenBudgets:
    placed, inventory = _on_launched(config, num_ranks, memory_gib)
    chosen = with_budgets(placed, inventory, are_devices_logical=inventory is None)
    return replace(chosen, config=with_budgets_of(config, chosen.config))
