"""Supervised run of ranks that a launcher started: no cluster, no driver; the first rank writes and prints."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hotseat.config import Config, loads_saved
from hotseat.config.batches import token_budget
from hotseat.config.precision import with_dtype
from hotseat.config.presence import has_reference
from hotseat.errors import UserError
from hotseat.loop.inputs import supervised_inputs
from hotseat.loop.opening import (
    OpenRun,
    are_budgets_tried,
    export_models,
    open_run,
    stoppable,
    with_known_dtype,
)
from hotseat.loop.state.run_dir import write_config
from hotseat.loop.state.saving import Saver, for_ranks
from hotseat.loop.supervised.led_ranks import LedRanks, LedSaver
from hotseat.loop.supervised.supervised_loop import (
    SupervisedRun,
    TokenBudget,
    TrainingRanks,
    columns,
    train_supervised,
    worker_arguments,
)
from hotseat.loop.supervised.supervised_worker import SupervisedWorker
from hotseat.loop.workers.folder_proof import FolderProof, witness
from hotseat.machine import has_gpu
from hotseat.observe import LiveView, NullJournal
from hotseat.placement import GIB, DeviceKind, Inventory, Node
from hotseat.planning.budgets import (
    are_layers_chosen,
    smaller_budget_kept,
    uses,
    with_budget,
    with_budgets_of,
)
from hotseat.planning.config_plan import is_offloaded, make_plan, with_budgets

AGAIN = "start it again with checkpoint.resume=true"


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
    led_ranks = LedRanks(worker, rank)

    def on_this(method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [method(worker, *args, **kwargs)]

    ranks = TrainingRanks(each=on_this, call=led_ranks.call, on_first=on_this, num_ranks=num_ranks)
    try:
        with ExitStack() as stack:

            def begin() -> OpenRun:
                run = stack.enter_context(open_run(config, inputs, columns(inputs.data), view, AGAIN))
                if run.checkpoint is not None and run.evaluation is None:
                    ranks.resume(run.checkpoint)
                return run

            run = _open_on_first(config, led_ranks, begin, stack)
            if run.evaluation is not None:
                return run.evaluation
            saver = LedSaver(run.saver, led_ranks)
            budget = _budget(run, num_ranks, worker, saver)
            # A rank that runs out of memory ends alone, so that rank writes the budget for all.
            with smaller_budget_kept(lambda: budget.config, lambda smaller: write_config(run.run_dir, smaller)):
                num_steps, eval_every = inputs.algebra.num_steps or 0, config.eval.every
                supervised = SupervisedRun(num_steps, eval_every, inputs.data, ranks, budget)
                evaluation = train_supervised(supervised, run.journal, saver, run.checkpoint)
            with run.saver.exporting():
                led_ranks.led(lambda: export_models(run, ranks.exporting, inputs.tokenizer, num_steps))
        return evaluation
    finally:
        worker.close()


@contextmanager
def _folder_proof(config: Config, rank: int, num_ranks: int) -> Iterator[FolderProof | None]:
    """Have the first rank witness that the others see the folder of checkpoints; None: they need not."""
    folder = Path(config.checkpoint.path or config.run_dir)
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


def _open_on_first(
    config: Config, led_ranks: LedRanks[SupervisedWorker], begin: Callable[[], OpenRun], stack: ExitStack
) -> OpenRun:
    """Open the run on the first rank, and send the others its config, directory, checkpoint and evaluation."""
    opened: list[OpenRun] = []
    own_saver = Saver(config, Path(config.run_dir))

    def first() -> tuple[Any, ...]:
        opened.append(begin())
        run = opened[0]
        return run.config, run.run_dir, run.checkpoint, run.evaluation

    if not led_ranks.is_first:
        stack.enter_context(stoppable()).append(own_saver)
    facts = led_ranks.led(first)
    if opened:
        return opened[0]
    config, run_dir, checkpoint, evaluation = facts
    return OpenRun(config, run_dir, own_saver, checkpoint, NullJournal(), evaluation)


def _on_launched(config: Config, num_ranks: int) -> tuple[Config, Inventory | None]:
    """Return the config placed on a device per rank, and these devices; without GPUs, None."""
    import torch

    inventory = None
    if torch.cuda.is_available():
        memory_gib = torch.cuda.get_device_properties(0).total_memory / GIB
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
    placed, inventory = _on_launched(config, num_ranks)
    return is_offloaded(make_plan(placed, inventory, are_devices_logical=inventory is None), "reference")


def _budget(run: OpenRun, num_ranks: int, worker: SupervisedWorker, saver: LedSaver) -> TokenBudget:
    """Return the token budget that the ranks use, after agreeing on the smallest if the config leaves it to them."""
    import torch

    config, journal = run.config, run.journal
    if run.checkpoint is not None:
        config = with_budgets_of(config, loads_saved(str(run.checkpoint.state["config"])))
    has_gpus = torch.cuda.is_available()
    config = with_known_dtype(config, run.checkpoint, has_gpus, journal)
    placed, inventory = _on_launched(config, num_ranks)
    chosen = with_budgets(placed, inventory, are_devices_logical=not has_gpus)
    budget = TokenBudget(with_budgets_of(config, chosen.config), journal, saver.keep)
    if not uses(config):
        return budget
    for note in chosen.notes:
        journal.say(note)
    # Devices of other ranks may differ.
    tokens = min(worker.share(token_budget(budget.config.train), "agree on the size of micro-batches"))
    budget.config = with_budget(budget.config, "train", tokens)
    if chosen.config != placed and are_budgets_tried(has_gpus):
        budget.try_out(worker.fits)
    worker.use_budget(budget.max_tokens)
    saver.keep(budget.config)
    return budget
