"""The batch algebra: how prompts become samples, optimizer steps and micro-batches.

For `rl`, with P = rollout.batch_size, n = rollout.samples_per_prompt, B = train.batch_size, m = micro_batch_size,
E = train.max_epochs, W data-parallel ranks and N prompts in all passes together:

    samples per step            P * n
    optimizer steps per step    E * P * n / B          B must divide P * n; rounded where samples failed
    micro-batches per rank      B / (W * m)            W * m must divide B; with a token budget, W must
    steps                       N // P                 the tail of a pass joins the next; of the last it is dropped
    schedule length             steps * optimizer steps per step

For `sft`, `rm` and `dpo` a step is one optimizer step on B rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotseat.config.schema import Config
from hotseat.config.schema.rollout_options import RolloutConfig
from hotseat.config.schema.train_options import TrainConfig
from hotseat.errors import BatchError
from hotseat.words import quantity


@dataclass(frozen=True)
class BatchAlgebra:
    """Counts that follow from the batch sizes. `None`: not known before the data is read, or not fixed."""

    num_ranks: int
    prompts_per_step: int
    samples_per_step: int
    samples_per_optimizer_step: int
    optimizer_steps_per_step: int
    train_micro_batches: int | None  # per rank and optimizer step
    score_micro_batches: int | None  # per rank and step, for log-probs
    tokens_per_step: int  # upper bound
    num_rows: int | None  # of all passes together
    is_bound: bool  # the rows are not counted yet: `num_rows` is an upper bound
    num_steps: int | None
    num_dropped_rows: int | None  # tail of the last pass
    schedule_length: int | None
    warmup_steps: int | None


def warmup_steps(schedule_length: int, ratio: float) -> int:
    """Return the number of optimizer steps over which the learning rate rises, rounded up as in OpenRLHF.

    At least one step is left at the peak: a run of one step has no warm-up.
    """
    return min(math.ceil(schedule_length * ratio), max(0, schedule_length - 1))


def nearest_multiples(number: int, of: int) -> str:
    """Return the multiples below and above a number, as words: `96 or 128`."""
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)


def nearest_divisors(number: int, of: int) -> str:
    """Return the divisors of `of` below and above a number, as words."""
    small = [candidate for candidate in range(1, math.isqrt(of) + 1) if of % candidate == 0]
    divisors = sorted({*small, *(of // candidate for candidate in small)})
    below = [divisor for divisor in divisors if divisor <= number]
    above = [divisor for divisor in divisors if divisor > number]
    return " or ".join(map(str, [*below[-1:], *above[:1]]))


def is_auto(section: TrainConfig | RolloutConfig) -> bool:
    """Return whether the run chooses the size of micro-batches itself."""
    return section.micro_batch_size == "auto" and section.max_tokens_per_device is None


def token_budget(section: TrainConfig | RolloutConfig) -> int | None:
    """Return the most tokens of a micro-batch on one device; None if samples are counted, or nothing is chosen yet."""
    return section.chosen_tokens_per_device if is_auto(section) else section.max_tokens_per_device


def num_checkpointed(config: Config) -> int | None:
    """Return how many layers recompute their activations; None: all, also where the number is not chosen yet."""
    layers = config.train.checkpointed_layers
    return None if layers == "auto" else layers


def tokens_per_micro_batch(config: Config, max_tokens_per_device: int | None) -> int | None:
    """Return the most tokens of a micro-batch, whose sequences lie on `train.sequence_parallel_size` devices."""
    return None if max_tokens_per_device is None else max_tokens_per_device * config.train.sequence_parallel_size


def batch_algebra(config: Config, num_ranks: int, num_rows: int | None = None) -> BatchAlgebra:
    """Compute the counts, or raise an error with both numbers and the nearest sizes that fit.

    `num_ranks` is the data-parallel size of the actor. `num_rows` counts the data set; unset takes `data.max_samples`,
    which bounds it.
    """
    train, rollout, is_rl = config.train, config.rollout, config.has_rollouts
    group = rollout.samples_per_prompt if is_rl else 1
    prompts = rollout.batch_size if is_rl else train.batch_size
    samples = prompts * group
    problems = []
    if samples % train.batch_size:
        problems.append(
            f"train.batch_size {train.batch_size} does not divide the {samples} samples of a step"
            f" (rollout.batch_size {prompts} x rollout.samples_per_prompt {group}):"
            f" set it to {nearest_divisors(train.batch_size, samples)}"
        )
    train_micro_batches = _micro_batches(config, num_ranks, problems)
    score_micro_batches = None
    if is_rl and rollout.max_tokens_per_device is None and rollout.micro_batch_size != "auto":
        # Rounded up: samples may be dropped before scoring, so sizes need not divide.
        score_micro_batches = math.ceil(samples / (num_ranks * rollout.micro_batch_size))
    if problems:
        raise BatchError("batch sizes do not divide:\n" + "\n".join(f"  {problem}" for problem in problems))

    bounds = [bound for bound in (num_rows, config.data.max_samples) if bound is not None]
    rows = min(bounds) if bounds else None
    passes = train.num_episodes if is_rl else train.max_epochs
    total_rows = rows * passes if rows is not None else None
    num_steps = total_rows // prompts if total_rows is not None else None
    if rows is not None and total_rows is not None and total_rows < prompts:
        raise BatchError(
            f"{quantity(rows, 'row')} in {quantity(passes, 'pass', 'passes')} are fewer than the {prompts} of one step:"
            f" lower {'rollout' if is_rl else 'train'}.batch_size to {total_rows} or add data"
        )
    optimizer_steps = samples * (train.max_epochs if is_rl else 1) // train.batch_size
    schedule = num_steps * optimizer_steps if num_steps is not None else None
    return BatchAlgebra(
        num_ranks=num_ranks,
        prompts_per_step=prompts,
        samples_per_step=samples,
        samples_per_optimizer_step=train.batch_size,
        optimizer_steps_per_step=optimizer_steps,
        train_micro_batches=train_micro_batches,
        score_micro_batches=score_micro_batches,
        tokens_per_step=samples * config.data.max_length * config.task_entry.sequences_per_row,
        num_rows=total_rows,
        is_bound=num_rows is None,
        num_steps=num_steps,
        num_dropped_rows=total_rows - num_steps * prompts if total_rows is not None and num_steps is not None else None,
        schedule_length=schedule,
        warmup_steps=warmup_steps(schedule, config.actor.optimizer.warmup_ratio) if schedule is not None else None,
    )


def _micro_batches(config: Config, num_ranks: int, problems: list[str]) -> int | None:
    """Return the micro-batches per rank and optimizer step; None if a token budget decides. Appends to `problems`."""
    batch, micro = config.train.batch_size, config.train.micro_batch_size
    if config.train.max_tokens_per_device is not None or micro == "auto":
        if batch % num_ranks:
            problems.append(
                f"train.batch_size {batch} does not divide over {num_ranks} ranks:"
                f" set it to {nearest_multiples(batch, num_ranks)}"
            )
        return None
    if batch % (num_ranks * micro) == 0:
        return batch // (num_ranks * micro)
    message = (
        f"train.batch_size {batch} is not a multiple of {quantity(num_ranks, 'rank')} x train.micro_batch_size {micro}"
        f" = {num_ranks * micro}: set it to {nearest_multiples(batch, num_ranks * micro)}"
    )
    if batch % num_ranks == 0:
        message += f", or train.micro_batch_size to {nearest_divisors(micro, batch // num_ranks)}"
    problems.append(message)
    return None


def left_over_note(algebra: BatchAlgebra, config: Config) -> str | None:
    """Say how many rows at the end of the last pass are not learned from, and what would use them; None: no row."""
    if not algebra.num_dropped_rows or algebra.num_rows is None:
        return None
    is_rl, rows = config.has_rollouts, algebra.num_rows
    what, key = ("prompt", "rollout.batch_size") if is_rl else ("row", "train.batch_size")
    passes = config.train.num_episodes if is_rl else config.train.max_epochs
    unless = ", unless they replace filtered ones" if is_rl and config.algorithm.filtering.enabled else ""
    return (
        f"not used{unless}: the last {quantity(algebra.num_dropped_rows, what)} of the {rows:,} of"
        f" {quantity(passes, 'pass', 'passes')}, too few for a step of {algebra.prompts_per_step:,}; a {key} that"
        f" divides {rows:,}, such as {nearest_divisors(algebra.prompts_per_step, rows)}, uses all"
    )


def explain(algebra: BatchAlgebra, config: Config) -> list[tuple[str, str, str]]:
    """Return rows of (name, number, derivation) of every count, to be printed."""
    train, is_rl = config.train, config.has_rollouts
    prompts, samples, optimizer_steps = (
        f"{count:,}" for count in (algebra.prompts_per_step, algebra.samples_per_step, algebra.optimizer_steps_per_step)
    )
    rows: list[tuple[str, str, str]] = []
    if is_rl:
        passes = f"{samples} samples x {train.max_epochs} epoch(s) / {train.batch_size:,}"
        rows += [
            ("prompts per step", prompts, "rollout.batch_size"),
            ("samples per step", samples, f"{prompts} prompts x {config.rollout.samples_per_prompt}"),
            ("optimizer steps per step", optimizer_steps, passes),
        ]
    rows.append(("samples an optimizer step sees", f"{algebra.samples_per_optimizer_step:,}", "train.batch_size"))
    rows.append(_micro_row("micro-batches per rank", algebra.train_micro_batches, train.batch_size, train, algebra))
    if is_rl:
        count, whole = algebra.score_micro_batches, algebra.samples_per_step
        rows.append(_micro_row("log-prob micro-batches per rank", count, whole, config.rollout, algebra))
    is_pair, length = config.task_entry.rows == "pairs", f"{config.data.max_length:,}"
    sequences = f"{samples} pairs x 2 x {length}" if is_pair else f"{samples} sequences x {length}"
    rows.append(("tokens per step, at most", f"{algebra.tokens_per_step:,}", sequences))
    if algebra.num_rows is None:
        return [*rows, ("steps", "unknown", "set data.max_samples, or give --num-rows, to know")]
    num_passes = train.num_episodes if is_rl else train.max_epochs
    bound = "at most " * algebra.is_bound
    data = f"{bound}{quantity(algebra.num_rows // num_passes, 'row')} x {quantity(num_passes, 'pass', 'passes')}"
    left = f"{algebra.num_dropped_rows:,} left over and not used"
    schedule = f"{algebra.num_steps:,} steps x {optimizer_steps}, the first {algebra.warmup_steps:,} warm up"
    return [
        *rows,
        ("steps", f"{algebra.num_steps:,}", f"{data} / {prompts}, {left}"),
        ("learning-rate schedule length", f"{algebra.schedule_length:,}", schedule),
    ]


def _micro_row(
    what: str, count: int | None, whole: int, section: TrainConfig | RolloutConfig, algebra: BatchAlgebra
) -> tuple[str, str, str]:
    if count is not None:
        return what, f"{count:,}", f"{whole:,} / ({algebra.num_ranks} ranks x {section.micro_batch_size})"
    budget = token_budget(section)
    if budget is None:
        return what, "varies", "as many tokens as fit on the device, chosen when the run starts"
    return what, "varies", f"at most {budget:,} tokens each" + " on a device, chosen" * is_auto(section)
