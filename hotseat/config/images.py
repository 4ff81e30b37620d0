"""Options that do not go together with images, and where prepared images are kept."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hotseat.config.roles import has_reward_model, has_simulator
from hotseat.config.schema import Config
from hotseat.registry.backends import backend_entry
from hotseat.registry.engines import ENGINES, engine_entry

_OPEN = "not built for images yet"


def has_images(config: Config) -> bool:
    """Tell whether the policy sees images: those of the data, or those of a simulator."""
    return config.data.image_key is not None or (has_simulator(config) and config.env.images)


def image_conflicts(config: Config) -> list[tuple[str, str]]:
    """Return (key, message) of what cannot be had with images, or not without them."""
    data, train = config.data, config.train
    if not has_images(config):
        return []
    problems: list[tuple[str, str]] = []
    if data.image_key is not None and data.max_images_per_prompt == 0:
        problems.append(
            ("data.max_images_per_prompt", "0, and data.image_key names a column of images: set it to 1 or more")
        )
    if config.task == "rl":
        if not engine_entry(config.rollout.engine).sees_simulators and data.image_key is None:
            seeing = " or ".join(name for name, entry in ENGINES.items() if entry.sees_simulators)
            why = f"{config.rollout.engine} is not built for images of simulators yet: set it to {seeing}"
            problems.append(("rollout.engine", why))
        for key in ("quantization", "kv_cache_dtype"):
            if getattr(config.rollout, key) is not None:
                problems.append((f"rollout.{key}", f"fp8 is {_OPEN}: leave it unset"))
        if has_reward_model(config) and config.reward.retokenize:
            why = "images are prepared for the actor's tokens: choose a reward model with the actor's tokenizer"
            problems.append(("reward.retokenize", f"true, but {why}, and set it to false"))
        if config.agent.environment.family is not None and data.image_key is not None:
            why = f"environments of libraries are {_OPEN}: write an Environment, and set agent.path"
            problems.append(("agent.environment.family", why))
    for key, is_set in (
        ("train.sequence_parallel_size", train.sequence_parallel_size > 1),
        ("train.deepspeed.tensor_parallel_size", train.tensor_parallel_size > 1),
        ("train.deepspeed.deepcompile", backend_entry(train.backend).has_zero_options and train.deepspeed.deepcompile),
        ("train.liger_kernel", train.liger_kernel),
    ):
        if is_set:
            problems.append((key, f"{_OPEN}: leave it unset"))
    return problems


def filler_image(config: Config) -> Path:
    """Return the file of an image that says nothing, prepared for the run's model."""
    digest = hashlib.blake2b(str(config.actor.model).encode(), digest_size=8).hexdigest()
    return image_folder(config) / f"filler-{digest}.safetensors"


def largest_image(config: Config) -> Path:
    """Return the file of the prepared image of the most tokens, of the run's data and model."""
    data = config.data
    facts = f"{config.actor.model}\n{data.path}\n{config.eval.path}\n{data.max_images_per_prompt}\n{data.max_length}"
    digest = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
    return image_folder(config) / f"largest-{digest}.safetensors"


def image_folder(config: Config) -> Path:
    """Return the folder of prepared images, which the runs under one folder share."""
    return Path(config.run_dir).expanduser().absolute() / "images"
