"""The words of the project: what flows from a prompt to new weights, one type per stage.

Token tensors are flat: one value per token of the flattened batch, entry t belongs to token t (its log-prob, value,
advantage given what precedes it). A `TokenLayout` says how the flat tokens fall into segments and episodes and which
of them the policy sampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hotseat.failed import Failed as Failed


@dataclass(frozen=True)
class TokenLayout:
    """Boundaries of segments and episodes in the flat tokens of a batch.

    A segment is one token sequence: context, then tokens that the policy sampled and tokens that the environment
    inserted. An episode is one or more segments, in the order in which they were made.

    Two episodes, the first of two segments:

    >>> mask = torch.tensor([False, True, True, False, True, False, True])
    >>> layout = TokenLayout(mask, torch.tensor([0, 3, 5, 7]), torch.tensor([0, 0, 1]), num_episodes=2)
    >>> layout.token_episode.tolist(), layout.sampled_per_episode.tolist()
    ([0, 0, 0, 0, 0, 1, 1], [3, 1])
    """

    mask: Tensor  # [num_tokens] bool: the policy sampled this token
    offsets: Tensor  # [num_segments + 1] int64: segment s is tokens offsets[s] to offsets[s + 1]
    segment_episode: Tensor  # [num_segments] int64, ascending: the episode each segment belongs to
    num_episodes: int

    @property
    def num_tokens(self) -> int:
        return int(self.mask.shape[0])

    @property
    def num_segments(self) -> int:
        return int(self.segment_episode.shape[0])

    @cached_property
    def token_segment(self) -> Tensor:
        """[num_tokens] int64: the segment of each token."""
        lengths = self.offsets[1:] - self.offsets[:-1]
        segments = torch.arange(self.num_segments, device=self.mask.device)
        return torch.repeat_interleave(segments, lengths, output_size=self.num_tokens)  # waits for no device

    @cached_property
    def token_episode(self) -> Tensor:
        """[num_tokens] int64: the episode of each token."""
        return self.segment_episode[self.token_segment]

    @cached_property
    def sampled_per_episode(self) -> Tensor:
        """[num_episodes] int64: how many tokens the policy sampled in each episode."""
        counts = torch.zeros(self.num_episodes, dtype=torch.int64, device=self.mask.device)
        return counts.index_add_(0, self.token_episode, self.mask.to(torch.int64))


# --- prompts and sampling -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleKey:
    """Identity of a sample. The same key gives the same seed on every engine, in every attempt and at any time.

    >>> str(SampleKey(epoch=0, prompt=17, sample=3))
    '0/17/3'
    """

    epoch: int  # pass over the data, from 0
    prompt: int  # position of the prompt in the data set, before shuffling
    sample: int  # position in its group, from 0

    def __str__(self) -> str:
        return f"{self.epoch}/{self.prompt}/{self.sample}"

    def seed(self, run_seed: int, turn: int) -> int:
        """Return a 63-bit request seed, hashed so that neighbouring keys do not give neighbouring seeds."""
        text = f"{run_seed}/{self.epoch}/{self.prompt}/{self.sample}/{turn}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt data, rendered and tokenised once."""

    index: int  # position in the data set, before shuffling
    text: str
    token_ids: tuple[int, ...]
    label: Any = ""  # of the row: any value of JSON; "" in a run without data.label_key
    source: str = ""
    images: tuple[str, ...] = ()  # in order of their placeholders; see `hotseat.vision`
    # Of the row, for reward functions that are called by names, with the input as "prompt"; None: there is none.
    columns: Mapping[str, Any] | None = None
    answer: tuple[int, ...] = ()  # that the data gives, end token included; empty: it gives none
    teacher_prompt: tuple[int, ...] = ()  # that a teacher reads instead of this one; empty: it reads this one


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a request. The log-probs of its completion are of the distribution under these settings."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is all
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # strings that end the completion, with the token that completes one as its last


@dataclass(frozen=True)
class Request:
    """One generation that an engine is asked for: token ids in."""

    id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    images: tuple[str, ...] = ()  # of the placeholders among the tokens, in order
    streams: bool = False  # tokens are reported to the caller as they are sampled


WhenSampled = Callable[[tuple[int, ...]], object]  # takes all tokens of a request so far, whenever there are more


@dataclass(frozen=True)
class Completion:
    """The answer to a request: the token ids that the engine sampled, stop token included.

    >>> completion = Completion("0/17/3", (5, 9, 2), log_probs=(-0.1, -1.2, 0.0), versions=(4, 4, 5), finish="stop")
    >>> completion.versions  # the weights changed while it was sampled
    (4, 4, 5)
    """

    request_id: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # of each sampled token, at the sampling temperature
    versions: tuple[int, ...]  # weight version that sampled each token
    finish: Literal["stop", "length", "abort"]
    # When it was asked for and answered, in seconds after the episode began; None where no episode asked.
    span_s: tuple[float, float] | None = field(default=None, compare=False)
    stop: str | None = None  # the stop string that ended it; None: a stop token did, or it was cut
    # [num_tokens, width]: experts that tokens took, prompt first; without the last token, which was not processed.
    routing: np.ndarray[Any, Any] | None = field(default=None, compare=False)


GIVEN_VERSION = -2  # in `Segment.versions`, of tokens that the data gave instead of the policy


# --- episodes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """One token sequence of an episode: context, sampled tokens and tokens the environment inserted.

    A prompt of two tokens, and an answer of one:

    >>> ids, mask = torch.tensor([7, 8, 2]), torch.tensor([False, False, True])
    >>> Segment(ids, mask, torch.tensor([0.0, 0.0, -0.3]), torch.tensor([-1, -1, 4])).num_sampled
    1
    """

    token_ids: Tensor  # [num_tokens] int64
    mask: Tensor  # [num_tokens] bool: the policy sampled this token
    log_probs: Tensor  # [num_tokens] float32: the engine's, 0 where not sampled
    versions: Tensor  # [num_tokens] int32: weight version that sampled it, -1 where not sampled; `GIVEN_VERSION`
    images: tuple[str, ...] = ()  # of the placeholders among the tokens, in order
    routing: Tensor | None = None  # [num_tokens, width]: experts (`algorithms.routing`); None: nothing recorded them

    @property
    def num_sampled(self) -> int:
        # In numpy: an operation on a small tensor takes ten times as long, and there is one for every sample.
        return int(np.count_nonzero(self.mask.numpy()))


@dataclass(frozen=True)
class TurnFacts:
    """Per-turn metadata for logs. Seconds are counted from the begin of the episode."""

    asked_s: float
    answered_s: float
    tool_calls: tuple[str, ...] = ()  # `name(arguments)` each, where a program has tools


@dataclass(frozen=True)
class EpisodeFacts:
    """Per-episode metadata for logs. turns: in the order of `Episode.turn_lengths`."""

    turns: tuple[TurnFacts, ...] = ()
    waited_s: float = 0.0  # for a place among the episodes that are played at a time
    took_s: float = 0.0  # from its begin to its end


@dataclass(frozen=True)
class Episode:
    """One sample: a prompt and everything that agent, engine and environment added to it."""

    key: SampleKey
    segments: tuple[Segment, ...]
    query: str  # prompt and everything after it, as text, for reward functions and people
    is_truncated: bool = False
    turn_lengths: tuple[int, ...] = ()  # sampled tokens of each turn, in order across segments; empty: not recorded
    facts: EpisodeFacts | None = field(default=None, compare=False)
    action_length: int = 0  # tokens of one action in a simulator; 0: it was in none
    has_bootstrap: bool = False  # the last segment is the observation at which time ran out, for a critic to value

    @property
    def num_sampled(self) -> int:
        return sum(segment.num_sampled for segment in self.segments)

    @property
    def played_segments(self) -> tuple[Segment, ...]:
        """Return the segments without the one that is there for a critic alone."""
        return self.segments[:-1] if self.has_bootstrap else self.segments


@dataclass(frozen=True)
class ScoredEpisode:
    """An episode and its reward."""

    episode: Episode
    reward: float
    score: float  # used by dynamic filtering
    extra: Mapping[str, float] = field(default_factory=dict)
    # One per turn, or per action in a simulator, summing up to `reward`; empty: the episode has only `reward`.
    turn_rewards: tuple[float, ...] = ()


@dataclass(frozen=True)
class PromptGroup:
    """The scored samples of one prompt, in sample order. Samples whose reward failed are left out and counted.

    >>> episode = Episode(SampleKey(0, 17, 1), segments=(), query="1+2=3")
    >>> group = PromptGroup(Prompt(17, "1+2=", (7, 8)), (ScoredEpisode(episode, reward=1.0, score=1.0),), num_failed=1)
    >>> [str(sample.episode.key) for sample in group.samples]  # of two samples the first has no reward
    ['0/17/1']
    """

    prompt: Prompt
    samples: tuple[ScoredEpisode, ...]
    num_failed: int = 0


@dataclass(frozen=True)
class GroupChange:
    """Decision of a custom component about a group, before it is learned.

    rewards: one for each sample, in order, in the place of its reward and its score; None: they stay. drop: why the
    group is not learned, so that the next prompt replaces it; None: it stays. metrics: by name, of which metrics.jsonl
    has the means over groups.
    """

    rewards: Sequence[float] | None = None
    drop: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


# --- training ---------------------------------------------------------------------------------------------------------


def segment_offsets(lengths: Tensor) -> Tensor:
    """Return where segments of these lengths begin, and where the last one ends: [n] -> [n + 1] int64."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


@dataclass(frozen=True)
class MicroBatch:
    """Segments of an optimizer step, flat, for one forward and backward.

    The step's loss is Σ weights · loss per token, over all its micro-batches on all ranks. The weights are fixed for
    the whole step beforehand, so neither loss nor gradient depends on where the step was cut.

    >>> answers = [torch.tensor([7, 8, 2]), torch.tensor([7, 3])]
    >>> masks = [torch.tensor([False, False, True]), torch.tensor([False, True])]
    >>> batch = MicroBatch.from_segments(answers, masks, ["0/17/0", "0/17/1"])
    >>> batch.token_ids.tolist(), batch.offsets.tolist(), batch.layout.num_episodes
    ([7, 8, 2, 7, 3], [0, 3, 5], 2)
    """

    token_ids: Tensor  # [num_tokens] int64
    offsets: Tensor  # [num_segments + 1] int64: segment s is tokens offsets[s] to offsets[s + 1]
    mask: Tensor  # [num_tokens] bool: the tokens to learn from (those that the policy sampled)
    weights: Tensor  # [num_tokens] float: how much each token counts in the step's loss, 0 off the mask
    fields: Mapping[str, Tensor] = field(default_factory=dict)  # [num_tokens, ...] or [num_segments, ...] each
    sample_ids: tuple[str, ...] = ()  # one per segment; the segments of an episode share it, and stand together
    images: tuple[tuple[str, ...], ...] = ()  # those of each segment, in order; empty: no segment has any

    @classmethod
    def from_segments(
        cls,
        token_ids: Sequence[Tensor],
        masks: Sequence[Tensor] | None,
        sample_ids: Sequence[str],
        fields: Mapping[str, Sequence[Tensor]] = MappingProxyType({}),
        images: Sequence[tuple[str, ...]] = (),
    ) -> MicroBatch:
        """Lay segments flat, one after another. Weights are 0: they are set for the whole step.

        token_ids, masks and each of the fields: one tensor [length, ...] for each segment. masks None: no token is
        sampled.
        """
        offsets = segment_offsets(torch.tensor([tokens.shape[0] for tokens in token_ids], dtype=torch.int64))
        num_tokens = int(offsets[-1])

        def flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
            return torch.cat(list(tensors)) if tensors else torch.zeros(0, dtype=dtype)

        return cls(
            token_ids=flat(token_ids, torch.int64),
            offsets=offsets,
            mask=torch.zeros(num_tokens, dtype=torch.bool) if masks is None else flat(masks, torch.bool),
            weights=torch.zeros(num_tokens),
            fields={name: flat(values, torch.float32) for name, values in fields.items()},
            sample_ids=tuple(sample_ids),
            images=tuple(images) if any(images) else (),
        )

    def __post_init__(self) -> None:
        num_tokens, num_segments = self.num_tokens, self.num_segments
        assert self.mask.shape == (num_tokens,), f"mask: {tuple(self.mask.shape)}, not ({num_tokens},)"
        assert self.weights.shape == (num_tokens,), f"weights: {tuple(self.weights.shape)}, not ({num_tokens},)"
        assert len(self.sample_ids) == num_segments, f"{len(self.sample_ids)} sample ids, {num_segments} segments"
        assert len(self.images) in (0, num_segments), f"images of {len(self.images)} segments, not {num_segments}"
        for name, values in self.fields.items():
            assert values.shape[:1] in ((num_tokens,), (num_segments,)), (
                f"field {name}: first dimension of {tuple(values.shape)} is neither {num_tokens} tokens nor"
                f" {num_segments} segments"
            )

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_segments(self) -> int:
        return int(self.offsets.shape[0]) - 1

    @cached_property
    def layout(self) -> TokenLayout:
        """Layout in which neighbouring segments with the same sample id are one episode."""
        episode = -1
        segment_episode = []
        for previous, current in zip((None, *self.sample_ids), self.sample_ids, strict=False):
            episode += current != previous
            segment_episode.append(episode)
        return TokenLayout(
            mask=self.mask,
            offsets=self.offsets,
            segment_episode=to_device(torch.tensor(segment_episode, dtype=torch.int64), self.mask.device),
            num_episodes=episode + 1,
        )

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same micro-batch with every tensor on `device`."""
        if self.token_ids.device == device:
            return self
        return replace(
            self,
            token_ids=to_device(self.token_ids, device),
            offsets=to_device(self.offsets, device),
            mask=to_device(self.mask, device),
            weights=to_device(self.weights, device),
            fields={name: to_device(values, device) for name, values in self.fields.items()},
        )


def to_device(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Copy a tensor without waiting for work queued on the device, as a copy from pageable memory would."""
    if device is not None and device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


# --- residency --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moved:
    """Bytes and time that an offload or onload of parts took."""

    num_bytes: int  # that were offloaded from the device or onloaded to it
    num_bytes_copied: int  # of those, that the host holds a copy of; the others were dropped, or are onloaded empty
    ms: float

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.num_bytes + other.num_bytes, self.num_bytes_copied + other.num_bytes_copied, self.ms + other.ms
        )
