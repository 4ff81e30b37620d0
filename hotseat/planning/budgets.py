"""Token budgets of micro-batches where `micro_batch_size` is `auto`: one for updates, and one for scoring.

Each is the largest with which the plan still fits beside what is on the device in that phase, up to a bound beyond
which a larger micro-batch is not faster. Cutting a batch differently changes speed and rounding alone. On CPUs a budget
depends on the model alone, never on the machine or the placement, so that the same config gives the same bits.

Where `checkpointed_layers` is `auto`, the fewest layers recompute their activations with which a micro-batch fits that
is large enough to keep the device busy: recomputing a layer costs more than cutting a batch into smaller pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from hotseat.config import Config
from hotseat.config.batches import is_auto, num_checkpointed, token_budget
from hotseat.config.presence import has_simulator
from hotseat.config.schema.rollout_options import RolloutConfig
from hotseat.config.schema.train_options import TrainConfig
from hotseat.errors import BudgetError, PlacementError, RunError, causes
from hotseat.placement.memory_terms import GIB
from hotseat.placement.plan_types import Plan
from hotseat.placement.shapes import ModelShape

Use = Literal["train", "rollout"]  # the section of the config: updates, or scoring

MAX_TOKENS = 65_536  # of a micro-batch on one device; with more, a token takes no less time
UNPRICED_TOKENS = 8_192  # budget where the plan does not know the memory of the model or of the device
BUSY_TOKENS_BY_WIDTH = 2**24  # tokens x hidden size from which on a device is busy, and the fewest and most tokens
MIN_BUSY_TOKENS, MAX_BUSY_TOKENS = 4_096, 16_384
CPU_TOKENS = 8_192
CPU_GIB = 2.0  # most memory for activations
_UNIT = 256  # tokens; budgets are multiples of it

_ROUNDING = 1e-6  # GiB

_NAMES: Mapping[Use, str] = {"train": "micro-batches of updates", "rollout": "micro-batches of log-probs"}


@dataclass(frozen=True)
class ChosenBudgets:
    """Config with its token budgets, and notes on them to print, a line each.

    is_priced: the memory of models and devices is known; otherwise the budgets are a constant.
    """

    config: Config
    notes: tuple[str, ...] = ()
    is_priced: bool = True


def with_budget(config: Config, use: Use, tokens: int) -> Config:
    return config.with_options({f"{use}.chosen_tokens_per_device": tokens})


def _section(config: Config, use: Use) -> TrainConfig | RolloutConfig:
    return config.train if use == "train" else config.rollout


def uses(config: Config) -> tuple[Use, ...]:
    """List the uses (updates, scoring) whose token budget the run chooses itself."""
    names: tuple[Use, ...] = ("train", "rollout") if config.has_rollouts else ("train",)
    return tuple(use for use in names if is_auto(_section(config, use)))


def _open_uses(config: Config) -> list[Use]:
    return [use for use in uses(config) if _section(config, use).chosen_tokens_per_device is None]


def are_layers_chosen(config: Config) -> bool:
    """Tell whether it is settled how many layers recompute their activations."""
    return config.train.checkpointed_layers != "auto"


def with_layers(config: Config, num_layers: int | None) -> Config:
    """Return the config with so many layers that recompute their activations; None: all."""
    return config.with_options({"train.checkpointed_layers": num_layers})


def is_chosen(config: Config) -> bool:
    """Tell whether everything that the run chooses itself, budgets and layers, has been chosen."""
    return are_layers_chosen(config) and all(token_budget(_section(config, use)) is not None for use in uses(config))


def with_budgets_of(config: Config, other: Config) -> Config:
    """Return the config with what another, such as a checkpoint's, has chosen, where it has chosen nothing itself."""
    if not are_layers_chosen(config) and are_layers_chosen(other):
        config = with_layers(config, num_checkpointed(other))
    for use in _open_uses(config):
        tokens = _section(other, use).chosen_tokens_per_device
        if tokens is not None:
            config = with_budget(config, use, tokens)
    return config


def with_least_budgets(config: Config) -> Config:
    """Return the config with the smallest budgets wherever the run chooses them: if any budgets fit, these do."""
    for use in _open_uses(config):
        config = with_budget(config, use, least_tokens(config))
    return config


def with_whole_steps(config: Config, num_ranks: int) -> Config:
    """Return the config with a budget, where the run chooses it, for a rank's whole optimizer step at once."""
    if "train" not in _open_uses(config):
        return config
    return with_budget(config, "train", _most(config, "train", num_ranks, least_tokens(config)))


def least_tokens(config: Config) -> int:
    """Count the tokens on one device of a micro-batch with one sequence, or pair, as long as the config allows."""
    pair = config.task_entry.sequences_per_row
    return -(-config.data.max_length * pair // config.train.sequence_parallel_size)


def choose_on_cpu(config: Config, token_bytes: float | None) -> ChosenBudgets:
    """Choose budgets without accelerators.

    token_bytes: activations of one token in an update; None: not known.
    """
    most = CPU_TOKENS if token_bytes is None else min(CPU_TOKENS, int(CPU_GIB * GIB / token_bytes))
    made = config if are_layers_chosen(config) else with_layers(config, None)
    for use in _open_uses(config):
        tokens = most if use == "train" else CPU_TOKENS
        made = with_budget(made, use, max(least_tokens(config), tokens // _UNIT * _UNIT))
    return ChosenBudgets(made, _notes(config, made, "on CPUs the size depends on the model alone"))


def choose(
    config: Config,
    num_ranks: int,
    plan_with: Callable[[Config], Plan],
    model: ModelShape | None = None,
    assumed: str = "",
) -> ChosenBudgets:
    """Choose budgets for the devices of `plan_with`, which plans a config with all budgets chosen.

    num_ranks: data-parallel ranks. model: the trained model with most layers, if its shape is known. assumed: what
    `plan_with` takes for granted, for the note.
    """
    least = least_tokens(config)
    open_uses = _open_uses(config)
    made = config if are_layers_chosen(config) else with_layers(config, None)
    for use in open_uses:
        made = with_budget(made, use, least)
    lowest = plan_with(made)
    verdicts = {step.verdict for group in lowest.groups for step in group.steps}
    if not verdicts or "unknown" in verdicts:
        for use in open_uses:
            made = with_budget(made, use, max(least, UNPRICED_TOKENS))
        why = "a constant: the plan does not know the memory of every model or of the device"
        return ChosenBudgets(made, _notes(config, made, why), is_priced=False)

    def is_no_worse(tried: Config) -> bool:
        """Tell whether every step fits well, or takes no more than with the least budget, and no more is copied."""
        try:
            plan = plan_with(tried)
        except PlacementError:  # a part that may not be offloaded is in the way
            return False
        for group, small in zip(plan.groups, lowest.groups, strict=True):
            for step, smallest_step in zip(group.steps, small.steps, strict=True):
                if step.verdict != "fits" and step.used_gib > smallest_step.used_gib + _ROUNDING:
                    return False
        return _copied_gib(plan) <= _copied_gib(lowest) + _ROUNDING

    if not are_layers_chosen(config) and model is not None:
        busy = made
        if "train" in open_uses:
            tokens = min(MAX_BUSY_TOKENS, max(MIN_BUSY_TOKENS, BUSY_TOKENS_BY_WIDTH // model.hidden_size))
            busy = with_budget(made, "train", min(max(least, tokens), _most(config, "train", num_ranks, least)))
        tried = range(model.num_layers)  # more layers fit the better
        fewest = bisect_left(tried, True, key=lambda layers: is_no_worse(with_layers(busy, layers)))
        made = with_layers(made, fewest if fewest < model.num_layers else None)
    for use in open_uses:

        def fits(tokens: int, before: Config = made, use: Use = use) -> bool:
            return is_no_worse(with_budget(before, use, tokens))

        made = with_budget(made, use, _largest(least, _most(config, use, num_ranks, least), fits))
    why = f"the largest that fits and still gains speed{assumed}"
    if lowest.verdict == "does_not_fit":
        why = "the plan does not fit, and larger ones would make it worse"
    return ChosenBudgets(made, _notes(config, made, why))


def _most(config: Config, use: Use, num_ranks: int, least: int) -> int:
    """Return the most tokens of a rank in an optimizer step, or in scoring a rollout, at most `MAX_TOKENS`."""
    is_rl = config.has_rollouts
    group = config.rollout.samples_per_prompt if is_rl else 1
    samples = config.rollout.batch_size * group if use == "rollout" else config.train.batch_size
    share = samples if num_ranks == 1 else -(-samples // num_ranks) + group  # whole groups, so not quite even
    if has_simulator(config):  # every decision of an episode is a sequence
        if config.env.max_steps is None:
            return max(least, MAX_TOKENS)
        share *= -(-config.env.max_steps // config.env.chunk)
    return max(least, min(MAX_TOKENS, share * least))


def _largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number of tokens that fits, in whole units; `least` if none does."""
    if most <= least or fits(most):
        return most
    units = (most - least) // _UNIT
    too_many = bisect_left(range(units), True, key=lambda fewer: fits(least + (units - fewer) * _UNIT))
    return least + (units - too_many) * _UNIT


def _copied_gib(plan: Plan) -> float:
    """Return the GiB that are copied from devices to the host in a step of the run."""
    moves = [move for group in plan.groups for passing in group.hand_overs for move in passing.leaves]
    return sum(move.gib or 0.0 for move in moves if move.how == "copied")


def _notes(config: Config, made: Config, why: str) -> tuple[str, ...]:
    if made == config:
        return ()
    notes = [f"micro-batches: {describe(made)} ({why})"] if describe(made) != describe(config) else []
    if not are_layers_chosen(config):
        layers = num_checkpointed(made)
        how = "all" if layers is None else f"{layers}, as few as fit"
        notes.append(f"train.checkpointed_layers: {how}")
    if config.algorithm.aux_loss_coef > 0 and "train" in uses(config):
        notes.append(
            "algorithm.aux_loss_coef: the balancing loss is a mean over micro-batches, so it depends on where a step is"
            " cut; set train.micro_batch_size to a number for a cut that does not depend on the device"
        )
    return tuple(notes)


def describe(config: Config) -> str:
    words = {"train": "updates of at most {:,} tokens on a device", "rollout": "log-probs of at most {:,}"}
    budgets = [(use, token_budget(_section(config, use))) for use in uses(config)]
    return ", ".join(words[use].format(tokens) for use, tokens in budgets if tokens is not None)


# --- while it runs ----------------------------------------------------------------------------------------------------


def lowered_until(fits: Callable[[int], bool], tokens: int, least: int) -> int:
    """Halve a budget until it fits. `least` is not tried: a micro-batch of that size may never occur."""
    while tokens > least and not fits(tokens):
        tokens = max(least, tokens // 2)
    return tokens


def lowered_note(why: str, use: Use, tokens: int, before: int) -> str:
    return f"{why}: {_NAMES[use]} have at most {tokens:,} tokens on a device from now on, not {before:,}"


def smallest(lowered: Iterable[Mapping[Use, int]]) -> dict[Use, int]:
    """Return the smallest budget of any rank, by its use."""
    budget_of: dict[Use, int] = {}
    for budgets in lowered:
        for use, tokens in budgets.items():
            budget_of[use] = min(tokens, budget_of.get(use, tokens))
    return budget_of


@contextmanager
def smaller_budget_kept(config: Callable[[], Config], keep: Callable[[Config], object]) -> Iterator[None]:
    """Keep a smaller budget for resuming if the run in this block ends because a micro-batch was too large."""
    try:
        yield
    except RunError as error:
        cause = next((each for each in causes(error) if isinstance(each, BudgetError)), None)
        if cause is not None and cause.use in uses(config()):
            keep(with_budget(config(), "train" if cause.use == "train" else "rollout", cause.tokens))
        raise
