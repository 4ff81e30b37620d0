"""The checks of a run, in stages from cheap to dear. This is the table to which a new check is added.

What is imported here imports neither torch nor transformers at its top: the first stages run before these are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from hotseat.checks import (
    devices,
    files,
    hub,
    models,
    packages,
    placement,
    reward_columns,
    reward_servers,
    reward_trial,
    rewards,
    run_directory,
    tokenizers,
)
from hotseat.checks.stage import (
    Context,
    DataContext,
    DeviceContext,
    PlanContext,
    RanksContext,
    Stage,
    TokenizerContext,
    TrainingContext,
    run_checks,
)
from hotseat.config import Config
from hotseat.errors import Problem

CONFIG_AND_FILES: Stage[Context] = (
    files.options,
    files.flow,
    files.user_files,
    files.simulators,
    rewards.graders,
    rewards.judge,
    files.models,
    files.export_place,
    files.rows,
    files.columns,
    files.chat_template,
    files.lengths,
    files.unsupported_features,
)
RUN_DIRECTORY: Stage[Context] = (run_directory.is_free,)
HUB: Stage[Context] = (hub.models_and_data,)
# The user's code runs for the first time, and servers are connected to.
USER_CODE: Stage[Context] = (reward_servers.servers, reward_trial.reward_functions, rewards.sandbox)
PACKAGES: Stage[Context] = (packages.optional_packages,)
# Without a cluster: for the devices of this machine, or those that the config names.
PLACEMENT: Stage[PlanContext] = (
    placement.ranks_in_one_process,
    placement.reference_of_preferences,
    placement.host_memory,
    placement.transport,
    placement.user_functions,
    placement.components,
)
LAUNCHED_RANKS: Stage[RanksContext] = (placement.launched_ranks,)
MODELS: Stage[Context] = (models.models,)
TOKENIZERS: Stage[TokenizerContext] = (tokenizers.readers,)
DATA: Stage[DataContext] = (reward_columns.columns, models.teachers)
TRAINING: Stage[TrainingContext] = (devices.backends, devices.critic_warmup)
# On the devices of the cluster, right before models load.
DEVICES: Stage[DeviceContext] = (devices.eight_bits, devices.engine_dtype)


def startup_problems(config: Config) -> list[Problem]:
    """List everything that would stop a run and can be seen in the config and in files."""
    context = Context(config=config)
    return [problem for check in CONFIG_AND_FILES for problem in check(context)]


def check_config(config: Config, optional: Collection[str] = ()) -> None:
    """Raise for what would stop a run and can be found without running or loading anything. optional: see `Context`."""
    run_checks(Context(config=config, optional=optional), CONFIG_AND_FILES, RUN_DIRECTORY, HUB)


def check_user_code(config: Config, show: Callable[[str], object]) -> list[str]:
    """Try the user's code and servers, and return notes for the user. show: called with a line on what is tried now."""
    context = Context(config=config, show=show)
    run_checks(context, USER_CODE)
    return context.notes


def check_prerequisites(config: Config) -> None:
    """Raise for everything that would stop a run and can be seen without reading its data."""
    check_config(config)
    run_checks(Context(config=config), PACKAGES)
