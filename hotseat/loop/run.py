"""Starts a run: everything that can be wrong is found before a model loads, then the loop of the task takes over."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotseat import clock, faults
from hotseat.config import Config, loads_saved
from hotseat.config.batches import BatchAlgebra, batch_algebra, token_budget, tokens_per_micro_batch
from hotseat.config.maths import maths_notes
from hotseat.config.precision import idle_in_fp32, with_dtype, with_dtype_of
from hotseat.config.roles import has_critic
from hotseat.data import PromptOrder, digest_of
from hotseat.errors import CheckpointError, RunError, TooFewDevicesError, UserError
from hotseat.loop.budgets import (
    Use,
    describe,
    least_tokens,
    lowered_note,
    lowered_until,
    smaller_budget_kept,
    uses,
    with_budget,
    with_budgets_of,
)
from hotseat.loop.checkpoints import Checkpoint
from hotseat.loop.cpu import slow_dtype
from hotseat.loop.launched import Ensemble, LedSaver
from hotseat.loop.memory import has_gpu
from hotseat.loop.planning import (
    are_devices_logical,
    budgets_on,
    make_plan,
    num_data_parallel,
    plan_notes,
    plan_on,
    with_budgets,
)
from hotseat.loop.refusals import refuse_at_once
from hotseat.loop.rundir import (
    LOGS,
    forget_records,
    kept_config,
    make_run_dir,
    record_changes,
    save_plan,
    write_config,
)
from hotseat.loop.saving import BACKEND, IS_WRITTEN, MODEL, Parts, Saver, critic_folder, sole_owner
from hotseat.loop.start import make_view
from hotseat.loop.value_models import check_readers
from hotseat.observe import LiveView
from hotseat.placement import Inventory, Plan

if TYPE_CHECKING:
    from hotseat.loop.inputs import Taught

MAX_LOGICAL_DEVICES = 64


def start(config: Config, launched: bool = False, view: LiveView | None = None) -> dict[str, float]:
    """Run a config to its end.

    launched: this process is one rank of several that a launcher started. view: shows already that the run starts.
    """
    with clock.of_one_run(), view or make_view(config, launched) as view:
        refuse_what_cannot_start(config)
        _quieten_transformers()
        if config.task == "rl":
            return _start_rl(config, view)
        return _start_supervised(config, launched, view)


def refuse_what_cannot_start(config: Config) -> None:
    """Raise for everything that stands in the way, before a model loads."""
    refuse_at_once(config)
    absent = _packages_not_there(config)
    if absent:
        raise UserError("this run cannot start:\n" + "\n".join(f"  {key}: {message}" for key, message in absent))


def _packages_not_there(config: Config) -> list[tuple[str, str]]:
    from hotseat.observe import wandb_sink
    from hotseat.rollout import vllm_versions
    from hotseat.train import liger

    found = []
    if config.train.liger_kernel and not liger.is_installed():
        found.append(("train.liger_kernel", liger.HINT))
    if config.log.wandb.enabled and not wandb_sink.is_installed():
        found.append(("log.wandb.enabled", wandb_sink.HINT))
    if config.task == "rl" and config.rollout.engine == "vllm":
        problem = vllm_versions.what_is_wrong()
        if problem is not None:
            found.append(("rollout.engine", problem))
    return found


# --- reinforcement ----------------------------------------------------------------------------------------------------


def _start_rl(config: Config, view: LiveView) -> dict[str, float]:
    view.stage("reading tokenizer and data")
    from hotseat.loop.inputs import check_models, eos_token_ids, load_tokenizer, rl_prompts

    # Placement and batch sizes first: they need neither tokenizer nor data.
    dry = make_plan(config, _local_inventory(config))
    num_ranks = num_data_parallel(config, dry)
    batch_algebra(config, num_ranks)
    _check_transport(config, dry)
    tokenizer = load_tokenizer(config)
    check_models(config)
    check_readers(config, tokenizer)
    prompts, eval_prompts, notes = rl_prompts(config, tokenizer)
    algebra = batch_algebra(config, num_ranks, len(prompts))
    _check_training(config, algebra)
    if has_critic(config) and config.critic.warmup_steps >= (algebra.num_steps or 0):
        raise UserError(
            f"critic.warmup_steps is {config.critic.warmup_steps}, and the run has {algebra.num_steps} steps: the actor"
            f" would never learn; set it to {(algebra.num_steps or 1) - 1} or less, or add data"
        )
    with ExitStack() as stack:
        config, run_dir, saver, found = _open_run(config, stack, notes, prompts, tokenizer)
        if found is not None and _is_finished(config, found, algebra, run_dir):
            return dict(found.state["evaluation"])
        from hotseat.cluster import Cluster
        from hotseat.loop.care import doing_in, looked_after
        from hotseat.loop.ledger import Ledger
        from hotseat.loop.rl import COLUMNS, RlRun, train_rl

        journal = stack.enter_context(_journal(config, run_dir, algebra, COLUMNS, notes, view, found))
        stack.callback(_report, run_dir, journal)  # when the devices are free again
        journal.stage(_starting(config))
        cluster = stack.enter_context(_cluster(Cluster, config, dry))
        config, is_new_budget = _with_budgets(config, cluster, found, journal)
        plan = plan_on(config, cluster)
        save_plan(run_dir, plan)
        stack.enter_context(looked_after(cluster, journal, run_dir, config.cluster.silence_timeout_s, ("rollout",)))
        journal.say(f"{plan.label}: {', '.join(f'{role.name} on {role.on}' for role in plan.roles)}")
        for note in [*maths_notes(config), *plan_notes(config, cluster)]:
            journal.say(note)
        eos = eos_token_ids(config, tokenizer)
        ledger, logs = Ledger(run_dir), run_dir / LOGS
        journal.stage(_loading(config, plan), lambda: doing_in(cluster))
        run = RlRun(config, plan, algebra, cluster, prompts, eval_prompts, eos, ledger, journal, logs, stack)
        with saver.settled(journal), smaller_budget_kept(lambda: run.config, saver.keep):
            if is_new_budget and _is_tried(run.has_devices):
                journal.phase("update")
                run.try_budgets(saver.keep)
            saver.keep(run.config)
            final = train_rl(run, journal, saver, found)
        if config.checkpoint.export_critic:  # first: a run with its model is finished
            path = critic_folder(_model_folder(config, run_dir))
            run.export(path, role="critic")
            tokenizer.save_pretrained(path)
            journal.say(f"critic: {path}")
        _export(config, run_dir, run.export, tokenizer, journal)
    return final


def _with_budgets(config: Config, cluster: Any, found: Checkpoint | None, journal: Any) -> tuple[Config, bool]:
    """The config with its token budgets, and whether they are new: a resumed run has those of its checkpoint."""
    has_gpus = not are_devices_logical(cluster)
    config = _with_dtype(config, found, has_gpus, journal)
    if found is not None:
        config = with_budgets_of(config, loads_saved(str(found.state["config"])))
    chosen = budgets_on(config, cluster)
    if uses(config) and chosen.config == config:
        journal.say(f"micro-batches: {describe(config)} (as this run has chosen before)")
    for note in chosen.notes:
        journal.say(note)
    return chosen.config, chosen.config != config


def _with_dtype(config: Config, found: Checkpoint | None, has_gpus: bool, journal: Any) -> Config:
    """The config with the type of its computation: as it is set, as the checkpoint has it, or by the devices."""
    chosen = config if found is None else with_dtype_of(config, loads_saved(str(found.state["config"])))
    chosen = with_dtype(chosen, has_gpus)
    if config.train.dtype is None:
        where = "as in the checkpoint" if found is not None else f"for {'GPUs' if has_gpus else 'CPUs'}"
        journal.say(f"train.dtype: {chosen.train.dtype}, {where} (it is unset)")
        if chosen.train.dtype == "fp32":
            for key in idle_in_fp32(config):
                journal.say(f"{key}: no effect here: train.dtype is fp32")
    warning = None if has_gpus else slow_dtype(chosen)
    if warning is not None:
        journal.say(warning, kind="warning")
    return chosen


def _is_tried(has_devices: bool) -> bool:
    """Tell whether budgets are tried out: on a CPU there is no memory to measure, but a test may have it run out."""
    return has_devices or faults.is_armed("trial.forward")


def _check_transport(config: Config, dry: Plan) -> None:
    """Whether weights can travel as asked, if the devices are of this machine: others are asked when they are there."""
    import torch

    from hotseat.loop import settings

    if not os.environ.get("RAY_ADDRESS"):
        settings.weight_lanes(config, dry, torch.cuda.is_available())


# --- examples ---------------------------------------------------------------------------------------------------------


def _start_supervised(config: Config, launched: bool, view: LiveView) -> dict[str, float]:
    view.stage("reading tokenizer and data")
    from hotseat.loop.inputs import check_models, load_tokenizer, supervised

    tokenizer = load_tokenizer(config)
    check_models(config)
    taught = supervised(config, tokenizer)
    if launched:
        return _run_launched(config, tokenizer, taught, view)
    dry = make_plan(config, _local_inventory(config))
    num_ranks = num_data_parallel(config, dry)
    algebra = batch_algebra(config, num_ranks, len(taught.items))
    _check_training(config, algebra)
    with ExitStack() as stack:
        config, run_dir, saver, found = _open_run(config, stack, taught.notes, taught.items, tokenizer)
        if found is not None and _is_finished(config, found, algebra, run_dir):
            return dict(found.state["evaluation"])
        from hotseat.cluster import Cluster
        from hotseat.loop.care import doing_in, looked_after
        from hotseat.loop.supervised import SupervisedWorker

        columns = _supervised_columns(taught)
        journal = stack.enter_context(_journal(config, run_dir, algebra, columns, taught.notes, view, found))
        stack.callback(_report, run_dir, journal)
        journal.stage(_starting(config))
        cluster = stack.enter_context(_cluster(Cluster, config, dry))
        config, is_new_budget = _with_budgets(config, cluster, found, journal)
        plan = plan_on(config, cluster)
        save_plan(run_dir, plan)
        for note in plan_notes(config, cluster):
            journal.say(note)
        stack.enter_context(looked_after(cluster, journal, run_dir, config.cluster.silence_timeout_s))
        journal.stage(_loading(config, plan), lambda: doing_in(cluster))
        actor = cluster.launch(
            "actor",
            SupervisedWorker,
            args=_supervised_args(config, algebra, taught),
            per_rank=[
                {"rank": rank // config.train.num_sharing, "num_ranks": num_ranks}
                for rank in range(len(plan.role("actor").processes))
            ],
            processes=plan.role("actor").processes,
            num_threads=config.cluster.threads_per_process,
            timeout_s=config.cluster.call_timeout_s,
        )
        if found is not None:
            actor.call("go_on", str(found.path / BACKEND), dict(found.state))

        def snapshot(path: Path) -> Callable[[], bool]:
            actor.call("snapshot", str(path / BACKEND))
            return lambda: all(actor.call(IS_WRITTEN))

        def parts(evaluation: dict[str, float]) -> Parts:
            return Parts(
                num_bytes=lambda: sum(actor.call("saved_bytes")),
                write=lambda path: actor.call("save", str(path / BACKEND)),
                snapshot=snapshot,
                export=lambda path: actor.call("export", str(path)),
                state=lambda: {**actor.call("state")[0], "evaluation": evaluation, "num_ranks": actor.size},
            )

        kept = _KeptBudget(config, journal, saver.keep)
        with saver.settled(journal), smaller_budget_kept(lambda: kept.config, saver.keep):
            if is_new_budget and _is_tried(actor.call("device_type")[0] == "cuda"):
                kept.try_out(lambda *trial: all(actor.call("fits", *trial)))
                actor.call("use_budget", kept.max_tokens)
            saver.keep(kept.config)
            final = _train_supervised(
                config,
                algebra,
                taught,
                lambda: kept.noted(*actor.call("step_and_budget")[0]),
                lambda: actor.call("evaluate")[0],
                journal,
                saver,
                parts,
                found,
            )
        _export(config, run_dir, lambda path, *how: actor.call("export", str(path), *how), tokenizer, journal)
    return final


class _KeptBudget:
    """The token budget of supervised training: tried out before the first step, and lowered where memory runs out."""

    def __init__(self, config: Config, journal: Any, keep: Callable[[Config], object]):
        self.config = config
        self._journal = journal
        self._keep = keep

    @property
    def max_tokens(self) -> int:
        """The most tokens that a micro-batch may have."""
        budget = tokens_per_micro_batch(self.config, token_budget(self.config.train))
        assert budget is not None
        return budget

    def try_out(self, fits: Callable[[int, int, bool], bool]) -> None:
        """Halve the budget until a micro-batch of that size fits; for `fits`, see `BackendWorker`."""
        train, length = self.config.train, self.config.data.max_length

        def fit(tokens: int) -> bool:
            return fits(tokens * train.sequence_parallel_size, length, True)

        least = least_tokens(self.config)
        self._use(lowered_until(fit, token_budget(train) or least, least), "tried out")

    def noted(self, report: Any, lowered: Mapping[Use, int]) -> Any:
        """The report of a step, after which the budget may be smaller."""
        for tokens in lowered.values():
            self._use(tokens, "the device ran out of memory, and the step was made again")
        return report

    def _use(self, tokens: int, why: str) -> None:
        before = token_budget(self.config.train)
        if before is None or tokens >= before:
            return
        self.config = with_budget(self.config, "train", tokens)
        self._journal.say(lowered_note(why, "train", tokens, before), kind="warning")
        self._keep(self.config)


def _supervised_columns(taught: Taught) -> dict[str, str]:
    return {
        "loss": "loss {:.4f}",
        "eval/loss": "held out {:.4f}",
        **taught.lesson.columns,
        "grad_norm": "gradient {:.2f}",
        "tokens_per_s": "{:,.0f} tokens/s",
        "step_s": "{:.2f} s",
    }


def _supervised_args(config: Config, algebra: BatchAlgebra, taught: Taught) -> tuple[Any, ...]:
    from hotseat.loop import settings

    assert algebra.schedule_length is not None
    options = replace(
        settings.train_options(config, algebra.schedule_length),
        head=taught.lesson.head,
        value_head_prefix=config.algorithm.reward_modelling.value_head_prefix,
    )
    return (
        config.actor.model,
        options,
        taught.lesson,
        taught.items,
        taught.held_out,
        config.train.batch_size,
        settings.train_batches(config),
        config.seed,
        config.trust_remote_code,
    )


def _train_supervised(
    config: Config,
    algebra: BatchAlgebra,
    taught: Taught,
    step_once: Any,
    evaluate: Any,
    journal: Any,
    saver: Saver | LedSaver,
    parts: Callable[[dict[str, float]], Parts],
    found: Checkpoint | None,
) -> dict[str, float]:
    final: dict[str, float] = {} if found is None else dict(found.state["evaluation"])
    assert algebra.num_steps is not None
    for step in range(1 if found is None else found.step + 1, algebra.num_steps + 1):
        started_s = time.monotonic()
        journal.phase("update")
        report = step_once()
        seconds = time.monotonic() - started_s
        metrics = {
            "loss": report.loss,
            **taught.lesson.metrics(report),
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            "skipped_updates": float(report.num_skipped),
            "tokens_per_s": report.num_tokens / seconds,
            "step_s": seconds,
            **saver.metrics(),
        }
        if "aux_loss" in report.metrics:
            metrics["aux_loss"] = report.metrics["aux_loss"]
        every = config.eval.every
        is_due = step == algebra.num_steps or (every is not None and step % every == 0)
        is_evaluated = is_due and bool(taught.held_out)
        if is_evaluated:
            journal.phase("evaluate")
            final = evaluate()
            metrics |= final
        journal.step(step, metrics)
        saver.after_step(step, parts(final), final if is_evaluated else {}, journal)
    return final


def _run_launched(config: Config, tokenizer: Any, taught: Taught, view: LiveView) -> Any:
    """This process is one rank: no cluster, no driver. The first rank writes and prints."""
    from hotseat.loop.supervised import SupervisedWorker
    from hotseat.observe import Silence
    from hotseat.train.sequence import check_ranks
    from hotseat.train.tensor import TENSOR_PARALLEL_SIZE

    if config.checkpoint.background:
        raise UserError(
            "checkpoint.background is true, but ranks that a launcher started wait while they save: leave it unset, or"
            " use `hotseat run`, which starts the ranks itself"
        )
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    num_sharing = config.train.num_sharing
    config = with_dtype(config, has_gpu())  # which is refused, by its key, if a checkpoint was written in another
    check_ranks(config.train.sequence_parallel_size, num_ranks)
    check_ranks(config.train.tensor_parallel_size, num_ranks, TENSOR_PARALLEL_SIZE)
    algebra = batch_algebra(config, num_ranks // num_sharing, len(taught.items))
    _check_training(config, algebra)
    view.stage(f"loading {Path(config.actor.model or '').name} in {num_ranks} {'ranks' if num_ranks > 1 else 'rank'}")
    worker = SupervisedWorker(
        *_supervised_args(config, algebra, taught), rank=rank // num_sharing, num_ranks=algebra.num_ranks
    )
    ensemble = Ensemble(worker, rank)
    saver, journal = Saver(config, Path(config.run_dir)), Silence()
    try:
        with ExitStack() as stack:

            def begin() -> tuple[Config, Path, Checkpoint | None, bool]:
                nonlocal saver, journal
                again = "start it again with checkpoint.resume=true"
                opened, run_dir, saver, found = _open_run(config, stack, taught.notes, taught.items, tokenizer, again)
                if found is not None and _is_finished(config, found, algebra, run_dir):
                    return opened, run_dir, found, True
                columns = _supervised_columns(taught)
                journal = stack.enter_context(_journal(config, run_dir, algebra, columns, taught.notes, view, found))
                stack.callback(_report, run_dir, journal)
                if found is not None:
                    ensemble.call("go_on", str(found.path / BACKEND), dict(found.state))
                return opened, run_dir, found, False

            def parts(evaluation: dict[str, float]) -> Parts:
                return Parts(
                    num_bytes=lambda: sum(ensemble.call("saved_bytes")),
                    write=lambda path: ensemble.call("save", str(path / BACKEND)),
                    export=lambda path: ensemble.call("export", str(path)),
                    state=lambda: {**worker.state(), "evaluation": evaluation, "num_ranks": num_ranks},
                )

            if rank > 0:
                stack.enter_context(_stoppable()).append(saver)
            config, run_dir, found, is_finished = ensemble.led(begin)
            if found is not None and is_finished:
                return dict(found.state["evaluation"])
            led = LedSaver(saver, ensemble)
            kept = _launched_budget(config, num_ranks, worker, found, journal, led)
            # A rank that runs out of memory ends alone, so whichever it is writes the budget for all.
            with smaller_budget_kept(lambda: kept.config, lambda smaller: write_config(run_dir, smaller)):
                final = _train_supervised(
                    config,
                    algebra,
                    taught,
                    lambda: kept.noted(*worker.step_and_budget()),
                    worker.evaluate,
                    journal,
                    led,
                    parts,
                    found,
                )
            written = tokenizer if rank == 0 else None
            _export(config, run_dir, lambda path, *how: worker.export(str(path), *how), written, journal)
        return final
    finally:
        worker.close()


def _launched_budget(
    config: Config, num_ranks: int, worker: Any, found: Checkpoint | None, journal: Any, saver: LedSaver
) -> _KeptBudget:
    """Together. The token budget of ranks that a launcher started, if their config leaves it to them, in use."""
    import torch

    from hotseat.placement import GIB, DeviceKind, Node

    if found is not None:
        config = with_budgets_of(config, loads_saved(str(found.state["config"])))
    has_devices = torch.cuda.is_available()
    config = _with_dtype(config, found, has_devices, journal)
    inventory = None
    if has_devices:
        memory_gib = torch.cuda.get_device_properties(0).total_memory / GIB
        inventory = Inventory((Node(0, num_devices=num_ranks, device_kind=DeviceKind("GPU", memory_gib)),))
    alone: dict[str, Any] = {
        "component_placement": {"actor": f"0-{num_ranks - 1}"},
        "num_nodes": None,
        "node_groups": [],
    }
    placed = config.cluster.model_copy(update=alone)
    there = config.model_copy(update={"cluster": placed})
    chosen = with_budgets(there, inventory, are_devices_logical=not has_devices)
    kept = _KeptBudget(with_budgets_of(config, chosen.config), journal, saver.keep)
    if not uses(config):
        return kept
    for note in chosen.notes:
        journal.say(note)
    # Their devices may differ.
    tokens = min(worker.share(token_budget(kept.config.train), "agree on the size of micro-batches"))
    kept.config = with_budget(kept.config, "train", tokens)
    if chosen.config != there and _is_tried(has_devices):
        kept.try_out(worker.fits)
    worker.use_budget(kept.max_tokens)
    saver.keep(kept.config)
    return kept


# --- what both share --------------------------------------------------------------------------------------------------


def _check_training(config: Config, algebra: BatchAlgebra) -> None:
    """What ranks would refuse, each in its process and after engines have loaded their model."""
    import torch

    from hotseat.loop import settings
    from hotseat.train import deepcompile, liger
    from hotseat.train.make import check_options

    assert algebra.schedule_length is not None
    checked = with_dtype(config, torch.cuda.is_available() or bool(os.environ.get("RAY_ADDRESS")))
    check_options(settings.train_options(checked, algebra.schedule_length))
    if has_critic(config):
        check_options(settings.critic_options(checked, algebra.schedule_length))
    if os.environ.get("RAY_ADDRESS"):
        return  # other machines may have what this one lacks
    if config.train.liger_kernel:
        liger.check_device(torch.cuda.is_available())
    if config.train.backend == "deepspeed" and config.train.deepspeed.deepcompile:
        deepcompile.check_device(torch.cuda.is_available())


def _open_run(
    config: Config,
    stack: ExitStack,
    notes: list[str],
    rows: Sequence[Any],
    tokenizer: Any,
    command: str = "hotseat resume {run_dir}",
) -> tuple[Config, Path, Saver, Checkpoint | None]:
    """Open the run's directory for this process alone, and find the checkpoint it goes on from.

    The config that is returned has the token budgets that the run kept, which may be smaller than the checkpoint's.
    """
    savers = stack.enter_context(_stoppable())
    run_dir = make_run_dir(config)
    stack.enter_context(sole_owner(run_dir))
    kept = kept_config(run_dir) if config.checkpoint.resume else None
    if kept is not None and kept.task == config.task:
        config = with_budgets_of(config, kept)
    saver = Saver(config, run_dir, tokenizer)
    savers.append(saver)
    stack.enter_context(_advice(saver, command.format(run_dir=run_dir)))
    found = saver.find(stack, notes.append)
    if found is not None:
        PromptOrder(len(rows), config.seed, digest_of(rows)).at(found.state["order"])  # raises for other data
    if found is None:
        if (run_dir / "model").exists():
            raise UserError(f"{run_dir} holds a run that was finished without checkpoints: choose another name")
        forget_records(run_dir)
    else:
        record_changes(run_dir, found.step, saver.changes)
    write_config(run_dir, config)
    return config, run_dir, saver, found


@contextmanager
def _advice(saver: Saver, command: str) -> Iterator[None]:
    """Add to what ends a run how it is resumed, and to an interrupt what is lost."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(saver.ending(command))
        raise
    except RunError as error:
        step = saver.last_step()
        if step is not None and not isinstance(error, CheckpointError):
            error.add_note(f"go on after step {step}: {command}")
        raise


def _is_finished(config: Config, found: Checkpoint, algebra: BatchAlgebra, run_dir: Path) -> bool:
    """Whether the checkpoint is of the last step and the model was exported; says so."""
    if found.step > (algebra.num_steps or 0):
        raise UserError(
            f"{found.path} is of step {found.step}, and this run would end after {algebra.num_steps}: set"
            f" {'train.num_episodes' if config.task == 'rl' else 'train.max_epochs'} higher, or use the model of that"
            " checkpoint"
        )
    model = _model_folder(config, run_dir)
    exported = model / "config.json"
    # `export_path` may hold the model of an earlier run.
    is_ours = exported.is_file() and exported.stat().st_mtime >= found.path.stat().st_mtime
    if found.step != algebra.num_steps or not is_ours:
        return False
    print(f"nothing to do: all {found.step} steps are done, the model is {model}")
    return True


def _local_inventory(config: Config) -> Inventory | None:
    """For checks before a cluster is there: what the config names, or this machine; unknown if a cluster waits."""
    if config.cluster.inventory is not None:
        return Inventory.parse(config.cluster.inventory)
    if os.environ.get("RAY_ADDRESS"):
        return None
    import torch

    if torch.cuda.is_available():
        return Inventory.parse(f"1x{torch.cuda.device_count()}")
    # Without accelerators devices are logical: one node with as many as the placement names.
    for num_devices in range(1, MAX_LOGICAL_DEVICES):
        try:
            inventory = Inventory.parse(f"1x{num_devices}")
            make_plan(config, inventory)
            return inventory
        except TooFewDevicesError:
            continue
    return Inventory.parse(f"1x{MAX_LOGICAL_DEVICES}")


def _cluster(make: Any, config: Config, dry: Plan) -> Any:
    """A cluster with room for the plan: an existing one, or our own with one logical device per planned device."""
    num_devices: int | None = 1 + max((device for role in dry.roles for device in role.devices), default=0)
    if os.environ.get("RAY_ADDRESS"):
        num_devices = None  # that cluster has its own
    return make(config.cluster.runtime, num_devices=num_devices, timeout_s=config.cluster.call_timeout_s)


def _journal(
    config: Config,
    run_dir: Path,
    algebra: BatchAlgebra,
    columns: Any,
    notes: Sequence[str],
    view: LiveView,
    found: Checkpoint | None = None,
) -> Any:
    """All that the run will tell, beginning with the notes that were made before."""
    from hotseat.observe import Journal

    num_steps = algebra.num_steps or 0
    view.expect(num_steps, columns)
    journal = Journal(
        run_dir,
        view,
        num_steps=num_steps,
        log_every=config.log.every,
        tensorboard=Path(config.log.tensorboard_path) if config.log.tensorboard_path else None,
        last_step=None if found is None else found.step,
        started_s=clock.began_s(),
    )
    wandb = _wandb(config, run_dir, journal.say, is_resumed=found is not None)
    if wandb is not None:
        journal.add(wandb)
    for note in notes:
        journal.say(note, kind="warning" if note.startswith("warning:") else "note")
    return journal


def _report(run_dir: Path, journal: Any) -> None:
    """The page to look at, however the run ended. A run does not fail because its page cannot be made."""
    from hotseat.observe.report import write_report

    try:
        journal.end_phase()
        journal.timeline.flush()
        journal.say(f"report: {write_report([run_dir], run_dir / 'report.html')}")
    except Exception as error:
        # Said where nothing has to be written: a full disk may be why.
        print(f"the report could not be written: {type(error).__name__}: {error}", file=sys.stderr)


def _wandb(config: Config, run_dir: Path, say: Callable[..., object], is_resumed: bool) -> Any:
    """Reports to Weights & Biases, if the config or a key in the environment asks for it."""
    from hotseat.observe import wandb_sink

    section = config.log.wandb
    if not wandb_sink.is_wanted(section.enabled, os.environ):
        return None
    if not wandb_sink.is_installed():
        say(f"{wandb_sink.KEY} is set, but {wandb_sink.HINT}")
        return None
    return wandb_sink.WandbSink(
        run_dir,
        config.model_dump(mode="json"),
        say,
        is_resumed=is_resumed,
        entity=section.org,
        project=section.project,
        group=section.group,
        name=section.run_name or run_dir.name,
    )


def _starting(config: Config) -> str:
    """Word the stage in which a cluster is started, or met."""
    if config.cluster.runtime == "local":
        return "preparing to run in this process"
    return f"attaching to Ray at {os.environ['RAY_ADDRESS']}" if os.environ.get("RAY_ADDRESS") else "starting Ray"


def _loading(config: Config, plan: Plan) -> str:
    """Word the stage in which every role loads its model."""
    counts = {role.name: len(role.processes) for role in plan.roles}
    named = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in counts.items())
    engine = ", vLLM compiles" if config.task == "rl" and config.rollout.engine == "vllm" else ""
    return f"starting processes, which load {Path(config.actor.model or '').name}{engine}: {named}"


def _model_folder(config: Config, run_dir: Path) -> Path:
    return Path(config.checkpoint.export_path) if config.checkpoint.export_path else run_dir / MODEL


def _export(config: Config, run_dir: Path, export: Any, tokenizer: Any, journal: Any) -> None:
    """The Hugging Face model, with its tokenizer, and beside it the moving average if there is one."""
    path = _model_folder(config, run_dir)
    journal.phase("export")
    # The model last: where it is, all was exported.
    if config.train.ema.enabled:
        average = path.with_name(f"{path.name}_ema")
        export(average, True)
        if tokenizer is not None:
            tokenizer.save_pretrained(average)
        journal.say(f"moving average: {average}")
    export(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    journal.say(f"model: {path}")


def _quieten_transformers() -> None:
    """No bars for reading and writing local files between the lines of a run. Downloads still show theirs."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()  # the hub's too
    if not os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"):
        enable_progress_bars()


@contextmanager
def _stoppable() -> Iterator[list[Saver]]:
    """SIGTERM ends a run as Ctrl-C does: through the clean-up of everything that was started.

    With a saver in the list that is given, the first SIGTERM lets the step under way finish and be saved.
    """
    savers: list[Saver] = []
    if threading.current_thread() is not threading.main_thread():
        yield savers
        return

    def stop(number: int, frame: object) -> None:
        waiting = [saver for saver in savers if saver.can_save and saver.has_begun and not saver.is_stopping]
        if not waiting:
            raise KeyboardInterrupt
        for saver in waiting:
            saver.is_stopping = True
        # Straight to the file: whoever was interrupted may hold the locks of everything else.
        os.write(2, b"hotseat: SIGTERM: this step is finished and saved, then the run ends; a second one ends it now\n")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield savers
    finally:
        signal.signal(signal.SIGTERM, before)
