"""Conflicts of `data`: lengths, parts, templates and images."""

from __future__ import annotations

from hotseat.config.annotations import RL
from hotseat.config.conflicts.conflict_list import Problems, conflict
from hotseat.config.presence import has_images, has_reward_model
from hotseat.config.schema import Config
from hotseat.registry.backends import backend_entry
from hotseat.registry.engines import ENGINES, engine_entry

_OPEN = "not built for images yet"


@conflict()
def prompts_that_leave_no_room(config: Config) -> Problems:
    prompt, whole = config.data.prompt_max_length, config.data.max_length
    if prompt is not None and prompt >= whole:
        yield "data.prompt_max_length", f"{prompt} leaves no token to sample within data.max_length {whole}"


@conflict()
def answers_that_leave_no_room(config: Config) -> Problems:
    answer, whole = config.rollout.max_new_tokens, config.data.max_length
    if answer is not None and answer >= whole:
        yield "rollout.max_new_tokens", f"{answer} leaves no room for a prompt within data.max_length {whole}"


@conflict()
def probabilities_of_other_parts(config: Config) -> Problems:
    probs, path = config.data.probs, config.data.path
    if probs is not None and path is not None:
        num_paths, num_probs = len(path.split(",")), len(probs.split(","))
        if num_paths != num_probs:
            yield "data.probs", f"{num_probs} probabilities for {num_paths} data sets in data.path"


@conflict()
def template_without_prompt(config: Config) -> Problems:
    template = config.data.input_template
    if template is not None and template.count("{}") != 1:
        yield "data.input_template", f"{template!r} needs exactly one {{}} for the prompt"


@conflict()
def image_column_without_images(config: Config) -> Problems:
    if config.data.image_key is not None and config.data.max_images_per_prompt == 0:
        yield "data.max_images_per_prompt", "0, and data.image_key names a column of images: set it to 1 or more"


@conflict(RL)
def images_in_rollouts(config: Config) -> Problems:
    if not has_images(config):
        return
    has_column, rollout = config.data.image_key is not None, config.rollout
    if not engine_entry(rollout.engine).sees_simulators and not has_column:
        seeing = " or ".join(name for name, entry in ENGINES.items() if entry.sees_simulators)
        yield "rollout.engine", f"{rollout.engine} is not built for images of simulators yet: set it to {seeing}"
    for key in ("quantization", "kv_cache_dtype"):
        if getattr(rollout, key) is not None:
            yield f"rollout.{key}", f"fp8 is {_OPEN}: leave it unset"
    if has_reward_model(config) and config.reward.retokenize:
        why = "images are prepared for the actor's tokens: choose a reward model with the actor's tokenizer"
        yield "reward.retokenize", f"true, but {why}, and set it to false"
    if config.agent.environment.family is not None and has_column:
        why = f"environments of libraries are {_OPEN}: write an Environment, and set agent.path"
        yield "agent.environment.family", why


@conflict()
def images_in_training(config: Config) -> Problems:
    train = config.train
    for key, is_set in (
        ("train.sequence_parallel_size", train.sequence_parallel_size > 1),
        ("train.deepspeed.tensor_parallel_size", train.tensor_parallel_size > 1),
        ("train.deepspeed.deepcompile", backend_entry(train.backend).has_zero_options and train.deepspeed.deepcompile),
        ("train.liger_kernel", train.liger_kernel),
    ):
        if is_set and has_images(config):
            yield key, f"{_OPEN}: leave it unset"
