"""The checks of a run, in stages from cheap to dear. This is the table to which a new check is added.

What is imported here imports neither torch nor transformers at its top: the first stages run before these are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from hotseat.checks import (
    capabilities,
    checkpoint_urls,
    hub,
    model_configs,
    named_files,
    nodes,
    opened_ports,
    plans,
    reward_columns,
    reward_sources,
    reward_trial,
    run_directory,
    tokenizers,
)
from hotseat.checks.nodes import NodesContext
from hotseat.checks.stage import (
    CheckContext,
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

CONFIG_AND_FILES: Stage[CheckContext] = (
    named_files.options,
    named_files.flow,
    opened_ports.endpoint,
    opened_ports.dashboard,
    named_files.user_files,
    named_files.simulators,
    reward_sources.graders,
    reward_sources.judge,
    named_files.models,
    named_files.export_place,
    named_files.rows,
    named_files.columns,
    named_files.chat_template,
    named_files.lengths,
    named_files.unsupported_features,
)
RUN_DIRECTORY: Stage[CheckContext] = (run_directory.is_free,)
HUB: Stage[CheckContext] = (hub.push, hub.models_and_data, checkpoint_urls.place)
# The user's code runs for the first time, and servers are connected to.
USER_CODE: Stage[CheckContext] = (reward_sources.servers, reward_trial.reward_functions, reward_sources.sandbox)
PACKAGES: Stage[CheckContext] = (capabilities.optional_packages,)
# Without a cluster: for the devices of this machine, or those that the config names.
PLACEMENT: Stage[PlanContext] = (
    plans.ranks_in_one_process,
    plans.reference_of_preferences,
    plans.host_memory,
    plans.loading_memory,
    plans.memory_snapshots,
    plans.transport,
    plans.user_functions,
    plans.components,
)
LAUNCHED_RANKS: Stage[RanksContext] = (plans.launched_ranks,)
MODELS: Stage[CheckContext] = (model_configs.models,)
TOKENIZERS: Stage[TokenizerContext] = (tokenizers.readers, tokenizers.chat_template_variables)
DATA: Stage[DataContext] = (
    reward_columns.columns,
    model_configs.teachers,
    model_configs.given_answers,
    model_configs.teacher_prompts,
)
TRAINING: Stage[TrainingContext] = (capabilities.backends, capabilities.critic_warmup)
# On a cluster that exists, once its nodes are known.
NODES: Stage[NodesContext] = (nodes.memory_snapshots, nodes.alike)
# On the devices of the cluster, right before models load.
DEVICES: Stage[DeviceContext] = (capabilities.fp8, capabilities.engine_dtype)
# Of commands without training, on the devices of this machine.
ENGINE_ALONE: Stage[DeviceContext] = (plans.engine_memory,)


def startup_problems(config: Config) -> list[Problem]:
    """List everything that would stop a run and can be seen in the config and in files."""
    context = CheckContext(config=config)
    return [problem for check in CONFIG_AND_FILES for problem in check(context)]


def check_config(config: Config, optional: Collection[str] = ()) -> None:
    """Raise for what stops a run and shows without running or loading anything. optional: see `CheckContext`."""
    run_checks(CheckContext(config=config, optional=optional), CONFIG_AND_FILES, RUN_DIRECTORY, HUB)


def check_user_code(config: Config, show: Callable[[str], object]) -> list[str]:
    """Try the user's code and servers, and return notes for the user. show: called with a line on what is tried now."""
    context = CheckContext(config=config, show=show)
    run_checks(context, USER_CODE)
    return context.notes


def check_prerequisites(config: Config) -> None:
    """Raise for everything that would stop a run and can be seen without reading its data."""
    check_config(config)
    run_checks(CheckContext(config=config), PACKAGES)
