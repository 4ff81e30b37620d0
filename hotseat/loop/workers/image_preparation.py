"""Prepares the images that environments and programs show, in the process that plays the episodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotseat.agents.agent import AgentError
from hotseat.agents.image_preparer import ImagePreparer
from hotseat.data.images import ImageLimits, ImageStore, load_processor, processor_template
from hotseat.data.row_problems import BadValue
from hotseat.model_source import ModelSource
from hotseat.vision import PreparedImage, placeholder_ids, tokens_of


@dataclass(frozen=True)
class HostImages:
    """Settings of images that environments and programs show."""

    folder: str  # for those that are prepared in episodes
    data_folder: str  # of those of the data, which an episode may show again
    limits: ImageLimits
    largest: str | None = None  # the image of the most tokens that the engine was started for; None: any will do


def make_image_preparer(settings: HostImages | None, model: ModelSource, tokenizer: Any) -> ImagePreparer | None:
    """Return a preparer of images that prepares them as those of the data were; None without settings."""
    if settings is None:
        return None
    processor = load_processor(model, tokenizer)
    store = ImageStore(Path(settings.folder), processor, settings.limits, Path(settings.data_folder))
    most = None if settings.largest is None else tokens_of(settings.largest).count(store.image_token_id)

    def prepare(image: Any) -> PreparedImage:
        try:
            prepared = store.prepare(image, "an image of the episode", Path())
        except BadValue as error:
            raise AgentError(str(error)) from None
        num_tokens = prepared.token_ids.count(store.image_token_id)
        if most is not None and num_tokens > most:
            raise AgentError(
                f"an image of the episode: {num_tokens} tokens, and vLLM was started for images of {most}: make it"
                " smaller, or raise data.max_length"
            )
        return prepared

    template = None if tokenizer.chat_template else processor_template(model.name)
    ids = frozenset(placeholder_ids(model.config()))
    limits = settings.limits
    return ImagePreparer(prepare, store.image_token_id, ids, limits.max_images, template, processor, limits.max_bytes)
