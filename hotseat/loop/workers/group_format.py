"""Samples as rows and flat arrays, and a scored group as bytes.

The bytes are a mark, the length of a JSON header, that header, then texts, numbers and pixels.

Files of groups are read back when a run resumes or is replayed, so the format holds data only: no pickle, which could
run code when it is loaded.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotseat.algorithms.routing import unknown_routing
from hotseat.types import Episode, EpisodeFacts, Prompt, PromptGroup, SampleKey, ScoredEpisode, Segment, TurnFacts
from hotseat.vision import PackedImage

_HEAD = struct.Struct("<8sQ")  # the mark and the length of the header
_MARK = b"group 3\n"
_UTF_8 = ("utf-8", "surrogatepass")  # a decoded text may have half a pair
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, StopIteration, struct.error)
_NUMBERS = "biuf"  # kinds of numpy types that files may hold


def _names(kind: Any, *others: str) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind) if each.name not in others)


# Fields that are JSON, whatever they are called; the others have a form of their own. A given answer is in the samples.
_PROMPT = _names(Prompt, "text", "token_ids", "answer", "teacher_prompt")
_EPISODE = _names(Episode, "key", "segments", "query", "facts")
_SCORE = _names(ScoredEpisode, "episode")
_prompt_of, _episode_of, _score_of = attrgetter(*_PROMPT), attrgetter(*_EPISODE), attrgetter(*_SCORE)
_key_of = attrgetter(*_names(SampleKey))
_tensors_of = attrgetter("token_ids", "mask", "log_probs", "versions")


class NotAGroup(ValueError):
    """Bytes that are not a group in this format."""


def encode_group(group: PromptGroup, facts: Mapping[str, Any]) -> list[bytes | memoryview]:
    """Return the parts of a file that holds a group, and facts about it as JSON."""
    segments = [segment for sample in group.samples for segment in sample.episode.segments]
    arrays = [np.array(group.prompt.token_ids, dtype=np.int64), *columns_of(group.samples)]
    shown = itertools.chain(group.prompt.images, *(segment.images for segment in segments))
    packed = {str(image): image for image in shown if isinstance(image, PackedImage)}
    # Texts are not in the header: JSON takes ten times as long for them.
    texts = [group.prompt.text, *(sample.episode.query for sample in group.samples)]
    text = "".join(texts).encode(*_UTF_8)
    header = {
        "facts": facts,
        "prompt": _prompt_of(group.prompt),
        "num_failed": group.num_failed,
        "samples": [row_of(sample) for sample in group.samples],
        "texts": [len(text), *map(len, texts)],
        "arrays": [[array.dtype.str, *array.shape] for array in arrays],
        "pixels": [[name, image.is_compressed, len(image.stored)] for name, image in packed.items()],
    }
    head = json.dumps(header, default=_plain).encode()
    numbers = [array.data.cast("B") for array in arrays if len(array)]
    return [_HEAD.pack(_MARK, len(head)), head, text, *numbers, *(image.stored for image in packed.values())]


def decode_group(data: bytes) -> tuple[PromptGroup, dict[str, Any]]:
    """Return the group and the facts that `encode_group` was given. Raises `NotAGroup`."""
    if not data.startswith(_MARK):
        raise NotAGroup("does not begin as one")
    try:
        return _decode(memoryview(data))
    except _DAMAGE as error:
        raise NotAGroup(f"is damaged ({type(error).__name__}: {error})") from None


def _decode(data: memoryview) -> tuple[PromptGroup, dict[str, Any]]:
    end = _HEAD.size + _HEAD.unpack_from(data)[1]
    header = json.loads(bytes(data[_HEAD.size : end]))

    def take(num_bytes: int) -> memoryview:
        nonlocal end
        begin, end = end, end + num_bytes
        if num_bytes < 0 or end > len(data):
            raise ValueError(f"it has {len(data)} bytes, and needs {end}")
        return data[begin:end]

    num_bytes, *sizes = header["texts"]
    text = str(take(num_bytes), *_UTF_8)
    ends = itertools.accumulate(sizes)
    prompt_text, *queries = [text[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    arrays = []
    for name, *shape in header["arrays"]:
        dtype = np.dtype(name)
        if dtype.kind not in _NUMBERS:
            raise TypeError(f"{name} is not a type of numbers")
        arrays.append(np.frombuffer(take(dtype.itemsize * math.prod(shape)), dtype).reshape(shape))
    packed = {name: PackedImage(name, bytes(take(size)), is_small) for name, is_small, size in header["pixels"]}
    if end != len(data):
        raise ValueError(f"it has {len(data)} bytes, and needs {end}")

    def images(names: Sequence[str]) -> tuple[str, ...]:
        return tuple([packed.get(name, name) for name in names])

    prompt_ids, *columns = arrays
    samples = samples_of(header["samples"], queries, columns, images)
    known = dict(zip(_PROMPT, header["prompt"], strict=True))
    known |= {"text": prompt_text, "token_ids": tuple(prompt_ids.tolist()), "images": images(known["images"])}
    return PromptGroup(Prompt(**known), tuple(samples), header["num_failed"]), header["facts"]


def columns_of(samples: Sequence[ScoredEpisode]) -> list[Any]:
    """Return the token ids, masks, log-probs and versions of all segments as an array each: [num_tokens].

    If any has routing, it is the last array: [num_tokens, width].
    """
    segments = [segment for sample in samples for segment in sample.episode.segments]
    columns = [torch.cat(column).numpy() for column in zip(*map(_tensors_of, segments), strict=True)]
    routing = routing_of(segments)
    return columns if routing is None else [*columns, torch.cat(routing).numpy()]


def routing_of(segments: Sequence[Segment]) -> list[Tensor] | None:
    """Return the routing of each segment, unknown where it has none; None if none has any."""
    known = next((segment.routing for segment in segments if segment.routing is not None), None)
    if known is None:
        return None
    return [
        unknown_routing(len(segment.token_ids), known) if segment.routing is None else segment.routing
        for segment in segments
    ]


def row_of(sample: ScoredEpisode) -> tuple[Any, ...]:
    """Return a sample in plain values, without its text and the tensors of its segments."""
    episode = sample.episode
    images = [segment.images for segment in episode.segments]
    return (
        _key_of(episode.key),
        _episode_of(episode),
        _score_of(sample),
        episode.facts,
        [len(segment.token_ids) for segment in episode.segments],
        images if any(images) else None,
    )


def samples_of(
    rows: Sequence[Sequence[Any]],
    queries: Sequence[str],
    columns: Sequence[Any],
    images_of: Callable[[Sequence[str]], tuple[str, ...]] = tuple,
) -> list[ScoredEpisode]:
    """Return the samples of which `row_of` made rows and `columns_of` made arrays."""
    lengths = [length for row in rows for length in row[-2]]
    split = [torch.from_numpy(column.copy()).split(lengths) for column in columns]
    parts: Iterator[Any] = zip(*split, strict=True)  # the tensors of each segment
    samples = []
    for (key, about, score, facts, own_lengths, shown), query in zip(rows, queries, strict=True):
        segments = tuple([_segment(next(parts), images_of(names)) for names in shown or [()] * len(own_lengths)])
        known = dict(zip(_EPISODE, map(_tuple, about), strict=True))
        episode = Episode(key=SampleKey(*key), segments=segments, query=query, facts=_facts(facts), **known)
        samples.append(ScoredEpisode(episode=episode, **dict(zip(_SCORE, map(_tuple, score), strict=True))))
    return samples


def _segment(columns: Sequence[Tensor], images: tuple[str, ...]) -> Segment:
    token_ids, mask, log_probs, versions, *routing = columns
    return Segment(token_ids, mask, log_probs, versions, images, *routing)


def _facts(stored: Any) -> EpisodeFacts | None:
    if type(stored) is not list:
        return stored
    turns, waited_s, took_s = stored
    return EpisodeFacts(tuple([TurnFacts(*map(_tuple, turn)) for turn in turns]), waited_s, took_s)


def _tuple(value: Any) -> Any:
    """Return a sequence as it was: JSON has no tuples, and fields of samples no lists."""
    return tuple(value) if type(value) is list else value


def _plain(value: Any) -> Any:
    """Return facts as a list, and a number of numpy or torch, which a user's agent may have left, as Python's."""
    if isinstance(value, EpisodeFacts | TurnFacts):
        return list(vars(value).values())
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic | Tensor) and math.prod(value.shape) == 1:
        return value.item()
    raise TypeError(f"a {type(value).__name__} in a sample: it can hold what JSON can")
