"""Paths of prepared images."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hotseat.config.schema import Config


def filler_image(config: Config) -> Path:
    """Return the file of an image that says nothing, prepared for the run's model."""
    digest = hashlib.blake2b(str(config.actor.model).encode(), digest_size=8).hexdigest()
    return image_folder(config) / f"filler-{digest}.safetensors"


def largest_image(config: Config) -> Path:
    """Return the file of the prepared image of the most tokens, of the run's data and model."""
    data = config.data
    facts = f"{config.actor.model}\n{data.path}\n{config.eval.path}\n{data.max_images_per_prompt}\n{data.max_length}"
    facts += "".join(f"\n{each.path}" for each in config.eval.sets.values())
    digest = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
    return image_folder(config) / f"largest-{digest}.safetensors"


def image_folder(config: Config) -> Path:
    """Return the folder of prepared images, which the runs under one folder share."""
    return Path(config.run_dir).expanduser().absolute() / "images"
