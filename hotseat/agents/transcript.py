"""The transcript of an episode so far, as tokens and as text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hotseat.algorithms.routing import GrowingRouting
from hotseat.types import Completion, Episode, EpisodeFacts, Prompt, SampleKey, Segment, TurnFacts

if TYPE_CHECKING:
    from hotseat.agents.image_preparer import ImagePreparer
from hotseat.vision import PreparedImage

_TAIL = 8  # tokens before a piece that can change how it decodes: a leading space, a character of several bytes


class Transcript:
    """Collects the tokens that the engine sampled and those that the environment added, and makes them an episode."""

    def __init__(self, tokenizer: Any, prompt: Prompt, preparer: ImagePreparer | None = None):
        self._tokenizer = tokenizer
        self._preparer = preparer  # of a VLM's images
        self._segments = [GrowingSegment(list(prompt.token_ids), prompt.images)]
        self._turn_lengths: list[int] = []
        self._turns: list[TurnFacts] = []
        self.text = prompt.text

    @property
    def context(self) -> list[int]:
        """Tokens to sample the next turn from."""
        return list(self._segments[-1].token_ids)

    @property
    def images(self) -> tuple[str, ...]:
        """Images of the placeholders in the context, in order."""
        return self._segments[-1].images

    @property
    def num_tokens(self) -> int:
        return len(self._segments[-1].token_ids)

    def add_sampled(self, completion: Completion) -> str:
        """Append what the engine sampled. Returns it as text, special tokens included."""
        text = decode_after(self._tokenizer, self._segments[-1].token_ids, completion.token_ids)
        self._segments[-1].add_sampled(completion)
        self._turn_lengths.append(len(completion.token_ids))
        if completion.span_s is not None:
            self._turns.append(TurnFacts(*completion.span_s))
        self.text += text
        return text

    def add_text(self, text: str, images: Sequence[PreparedImage] = ()) -> None:
        """Append text of the environment, with images in the places of their tokens."""
        self._add(self._segments[-1], text, images)
        self.text += text

    def start_again(self, text: str, images: Sequence[PreparedImage] = ()) -> None:
        """Start a new segment from another context, with images in the places of their tokens."""
        self._segments.append(GrowingSegment([]))
        self._add(self._segments[-1], text, images)
        self.text = text

    def _add(self, draft: GrowingSegment, text: str, images: Sequence[PreparedImage]) -> None:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if self._preparer is None:
            draft.add(token_ids)
            return
        token_ids, begins = self._preparer.expand(token_ids, images)
        for image, begin in zip(images, begins, strict=True):
            draft.add_image(image.path, begin)
        draft.add(token_ids)

    def episode(self, key: SampleKey, *, is_truncated: bool, last_words: str = "") -> Episode:
        """Return the episode. last_words: the environment's last feedback, kept as text only: no tokens follow it."""
        segments = tuple(draft.segment() for draft in self._segments if any(draft.mask))
        facts = EpisodeFacts(tuple(self._turns))
        return Episode(key, segments, self.text + last_words, is_truncated, tuple(self._turn_lengths), facts)


def _tensor(values: Sequence[Any], kind: Any) -> torch.Tensor:
    """Convert a list to a tensor through numpy, which reads lists several times as fast as torch."""
    return torch.from_numpy(np.array(values, dtype=kind))


def decode_after(tokenizer: Any, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """Decode tokens as a continuation of those before: decoded alone, some tokenizers drop the first token's space."""
    tail = tuple(before[-_TAIL:])
    head, whole = _decode_again(tokenizer, tail), decode(tokenizer, [*tail, *token_ids])
    return whole[len(head) :] if whole.startswith(head) else decode(tokenizer, token_ids)


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    # An array, because the tokenizer looks at each element of a list first, which takes longer than to decode it.
    ids = np.asarray(token_ids, dtype=np.int64)
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


_decode_again = functools.lru_cache(maxsize=1024)(decode)  # all samples of a prompt follow the same tokens


class GrowingSegment:
    """A segment that is still growing."""

    def __init__(self, token_ids: list[int], images: tuple[str, ...] = ()):
        self._images = [(0, image) for image in images]  # and where each begins, or something before it
        self.token_ids: list[int] = []
        self.mask: list[bool] = []
        self._log_probs: list[float] = []
        self._versions: list[int] = []
        self._routing = GrowingRouting()
        self.add(token_ids)

    def add(self, token_ids: Sequence[int]) -> None:
        num = len(token_ids)
        self._extend(token_ids, [False] * num, [0.0] * num, [-1] * num)

    def add_image(self, image: str, begin: int) -> None:
        """Add an image whose tokens come next, after `begin` others."""
        self._images.append((len(self.token_ids) + begin, image))

    @property
    def images(self) -> tuple[str, ...]:
        return tuple(image for _, image in self._images)

    def add_sampled(self, completion: Completion) -> None:
        num = len(completion.token_ids)
        assert num == len(completion.log_probs) == len(completion.versions), f"{completion.request_id}: uneven lengths"
        self._extend(completion.token_ids, [True] * num, completion.log_probs, completion.versions)
        self._routing.add(completion.routing, len(self.token_ids))

    def segment(self) -> Segment:
        """Return the segment up to its last sampled token: nothing is learned from the tokens after it."""
        end = len(self.mask) - self.mask[::-1].index(True)
        return Segment(
            token_ids=_tensor(self.token_ids[:end], np.int64),
            mask=_tensor(self.mask[:end], np.bool_),
            log_probs=_tensor(self._log_probs[:end], np.float32),
            versions=_tensor(self._versions[:end], np.int32),
            images=tuple(image for begin, image in self._images if begin < end),
            routing=self._routing.of(end),
        )

    def _extend(
        self, token_ids: Sequence[int], mask: Sequence[bool], log_probs: Sequence[float], versions: Sequence[int]
    ) -> None:
        self.token_ids.extend(token_ids)
        self.mask.extend(mask)
        self._log_probs.extend(log_probs)
        self._versions.extend(versions)
