"""Makes the settings of each worker from the config. Workers never see the config."""

from hotseat.loop.settings.engine_settings import (
    are_adapters_alone,
    engine_dtype,
    engine_settings,
    eval_sampling,
    judge_engine_settings,
    sampling,
)
from hotseat.loop.settings.host_settings import (
    component_settings,
    environment_settings,
    host_settings,
    image_limits,
    simulation_settings,
)
from hotseat.loop.settings.learning_settings import (
    critic_settings,
    is_filtered,
    policy_settings,
    reward_settings,
    score_batches,
    train_batches,
    weight_transports,
)
from hotseat.loop.settings.training_options import critic_options, reference_settings, reward_options, train_options

__all__ = [
    "are_adapters_alone",
    "component_settings",
    "critic_options",
    "critic_settings",
    "engine_dtype",
    "engine_settings",
    "environment_settings",
    "eval_sampling",
    "host_settings",
    "image_limits",
    "is_filtered",
    "judge_engine_settings",
    "policy_settings",
    "reference_settings",
    "reward_options",
    "reward_settings",
    "sampling",
    "score_batches",
    "simulation_settings",
    "train_batches",
    "train_options",
    "weight_transports",
]
