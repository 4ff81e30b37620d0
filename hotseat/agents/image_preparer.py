"""Images that an environment or a program shows in the middle of an episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hotseat.agents.agent import AgentError
from hotseat.vision import PreparedImage, expand_images


@dataclass(frozen=True)
class ImagePreparer:
    """Prepares images of environments for the model of the run, and puts them into texts.

    prepare: prepares one image; raises `AgentError` with what is wrong with it. image_token_id: stands where an image
    goes. placeholder_ids: tokens that no text may have elsewhere. max_images: of a context. chat_template: that of the
    model's processor, if the tokenizer has none. processor: that processor, without its part for videos.
    max_image_bytes: of an image as it is stored.
    """

    prepare: Callable[[Any], PreparedImage]
    image_token_id: int
    placeholder_ids: frozenset[int]
    max_images: int
    chat_template: str | None = None
    processor: Any = None
    max_image_bytes: int = 0
    # One thread, so that equal images of several episodes are written once; its own, so that no other work waits.
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "images"), repr=False)

    async def prepare_all(self, images: Sequence[Any], num_before: int) -> list[PreparedImage]:
        """Prepare images, in a thread. num_before: how many the context has already."""
        if num_before + len(images) > self.max_images:
            raise AgentError(
                f"an environment showed {len(images)} more images after {num_before}, and data.max_images_per_prompt"
                f" allows {self.max_images} in all"
            )
        if not images:
            return []
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: [self.prepare(image) for image in images])

    def expand(self, token_ids: Sequence[int], images: Sequence[PreparedImage]) -> tuple[list[int], list[int]]:
        """Replace the token of each image by those that stand for it; return the tokens, and where each image begins.

        Raises for a text that has another number of places, or a placeholder of videos.
        """
        num_places = sum(token_id == self.image_token_id for token_id in token_ids)
        strangers = self.placeholder_ids - {self.image_token_id}
        if num_places != len(images) or strangers & set(token_ids):
            raise AgentError(
                f"a text of the agent has {num_places} places for images, and it showed {len(images)}: write the"
                " model's image token where each one goes, and nowhere else"
            )
        expanded, begins = expand_images(token_ids, self.image_token_id, images)
        return expanded, [begins[at] for at, token_id in enumerate(token_ids) if token_id == self.image_token_id]

    def collapse(self, token_ids: Sequence[int], images: Sequence[PreparedImage]) -> list[int]:
        """Replace the tokens of each image by one placeholder. An image that has just one already keeps it."""
        collapsed: list[int] = []
        at = 0
        for image in images:
            ahead = image.token_ids.index(self.image_token_id)  # tokens of the image before its first placeholder
            try:
                place = token_ids.index(self.image_token_id, at)
            except ValueError:
                break
            begin = place - ahead
            is_whole = begin >= at and tuple(token_ids[begin : begin + len(image.token_ids)]) == image.token_ids
            collapsed += [*token_ids[at : begin if is_whole else place], self.image_token_id]
            at = begin + len(image.token_ids) if is_whole else place + 1
        return [*collapsed, *token_ids[at:]]


def listed(images: Any) -> tuple[Any, ...]:
    """Return the images that a user's environment gave, one or several of them."""
    if images is None:
        return ()
    if isinstance(images, str | bytes | bytearray) or not isinstance(images, Sequence):
        return (images,)
    return tuple(images)
