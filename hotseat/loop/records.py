"""Recorded samples: a few of each step, with facts for every token, for people to read (`samples.jsonl`).

What an episode is, the host knows (`record_of`); what the trainer made of it, the ranks of the actor know (`Recorder`).
`written` puts the line together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotseat.loop.losses import ADVANTAGES, PolicyObjective
from hotseat.train.backend import Outputs
from hotseat.types import MicroBatch, Prompt, SampleKey, ScoredEpisode

if TYPE_CHECKING:
    from hotseat.loop.collect import Collected
    from hotseat.loop.host import GroupFacts

NO_GRADIENT, SKIPPED = "no gradient", "skipped"


@dataclass(frozen=True)
class SegmentRecord:
    """What the host knows of one token sequence, an entry per token."""

    text: list[str]
    sampled: list[bool]
    engine_log_probs: list[float]
    versions: list[int]


@dataclass(frozen=True)
class SampleRecord:
    """What the host knows of one sample."""

    key: SampleKey
    source: str
    prompt_text: str
    label: str | None
    reward: float
    score: float
    is_truncated: bool
    extra: Mapping[str, float]
    segments: tuple[SegmentRecord, ...]


@dataclass
class TokenRecord:
    """What the trainer knows of one token sequence, an entry per token. `fates` is made when it is learned from."""

    trainer_log_probs: list[float]
    advantages: list[float]
    fates: list[str] = field(default_factory=list)


def record_of(sample: ScoredEpisode, prompt: Prompt, tokenizer: Any) -> SampleRecord:
    return SampleRecord(
        key=sample.episode.key,
        source=prompt.source,
        prompt_text=prompt.text,
        label=prompt.label,
        reward=sample.reward,
        score=sample.score,
        is_truncated=sample.episode.is_truncated,
        extra=dict(sample.extra),
        segments=tuple(
            SegmentRecord(
                text=token_texts(segment.token_ids.tolist(), tokenizer),
                sampled=segment.mask.tolist(),
                engine_log_probs=segment.log_probs.tolist(),
                versions=segment.versions.tolist(),
            )
            for segment in sample.episode.segments
        ),
    )


def token_texts(token_ids: Sequence[int], tokenizer: Any) -> list[str]:
    """The text that each token adds. Of a character that several tokens make up, the last one has it."""
    texts, start, shown = [], 0, ""
    for end in range(1, len(token_ids) + 1):
        whole = tokenizer.decode(token_ids[start:end])
        if whole.endswith("\N{REPLACEMENT CHARACTER}") and end - start < 8 and end < len(token_ids):
            texts.append("")  # not a character yet
            continue
        texts.append(whole[len(shown) :] if whole.startswith(shown) else whole)
        # One token of context is enough for a decoder that treats the first one of a text differently.
        start, shown = end - 1, tokenizer.decode(token_ids[end - 1 : end])
    return texts


class Recorder:
    """A rank's part: notes what becomes of the tokens of chosen samples while they are learned from."""

    def __init__(self, batch: MicroBatch, log_probs: Mapping[str, list[Tensor]]):
        """`log_probs`: the trainer's, before the update, of the segments of each chosen sample that this rank has."""
        self.tokens: dict[str, list[TokenRecord]] = {}
        for name, values in _segments(batch, batch.fields[ADVANTAGES]):
            if name in log_probs:
                mine = self.tokens.setdefault(name, [])
                mine.append(TokenRecord(log_probs[name][len(mine)].tolist(), values.tolist()))

    def watched(self, objective: PolicyObjective) -> Watched:
        return Watched(objective, self)

    def take_back(self, batches: Sequence[MicroBatch]) -> None:
        """The update that these were in was not finite, and not made."""
        for name in {name for batch in batches for name in batch.sample_ids} & self.tokens.keys():
            for segment in self.tokens[name]:
                segment.fates = [SKIPPED] * len(segment.fates)

    def note(self, batch: MicroBatch, clipped: Tensor, corrected: Tensor) -> None:
        if not self.tokens.keys() & set(batch.sample_ids):
            return
        fates = (clipped.to(torch.int64) + 2 * corrected.to(torch.int64)).cpu()
        seen: dict[str, int] = {}
        for name, values in _segments(batch, fates):
            if name in self.tokens:
                self.tokens[name][seen.get(name, 0)].fates = [_FATES[value] for value in values.tolist()]
                seen[name] = seen.get(name, 0) + 1


_FATES = ("learned", "clipped", "corrected", "clipped, corrected")


@dataclass(frozen=True)
class Watched:
    """An objective that tells a recorder what it did."""

    objective: PolicyObjective
    recorder: Recorder

    @property
    def needs_entropy(self) -> bool:
        return self.objective.needs_entropy

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        terms = self.objective.terms(outputs, batch)
        self.recorder.note(batch, terms.clipped, terms.corrected)
        return terms.loss, terms.metrics


def _segments(batch: MicroBatch, values: Tensor) -> list[tuple[str, Tensor]]:
    lengths = (batch.offsets[1:] - batch.offsets[:-1]).tolist()
    return list(zip(batch.sample_ids, values.split(lengths), strict=True))


# --- what is written --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """A sample to be recorded, and what became of it."""

    key: SampleKey
    state: str  # trained or dropped
    reason: str = ""


def choose(collected: Collected, step: int, count: int) -> list[Chosen]:
    """Up to `count` samples that are learned from and as many that were dropped, from groups all over the step."""
    kept = [Chosen(key, "trained") for key in _spread_out([*collected.groups], step, count)]
    reasons = {facts.key: reason for facts, reason in collected.dropped}
    keys = _spread_out([facts for facts, _ in collected.dropped], step, count)
    return kept + [Chosen(key, "dropped", reasons[key.epoch, key.prompt]) for key in keys]


def _spread_out(groups: Sequence[GroupFacts], step: int, count: int) -> list[SampleKey]:
    """A sample each of groups at equal distances, another position each time."""
    groups = [facts for facts in groups if facts.samples]
    picked = [groups[index * len(groups) // count] for index in range(count)] if groups else []
    keys = [
        SampleKey(facts.epoch, facts.prompt, facts.samples[(step + index) % len(facts.samples)])
        for index, facts in enumerate(picked)
    ]
    return list(dict.fromkeys(keys))


def failures(collected: Collected, step: int, count: int) -> list[dict[str, Any]]:
    """Lines for the first samples that came to nothing."""
    groups = [*collected.groups, *(facts for facts, _ in collected.dropped)]
    found = [(facts, sample, why) for facts in groups for sample, why in facts.failures]
    return [
        written_failure(step, SampleKey(facts.epoch, facts.prompt, sample), facts.source, why)
        for facts, sample, why in found[:count]
    ]


def written(step: int, chosen: Chosen, record: SampleRecord, tokens: Sequence[TokenRecord] | None) -> dict[str, Any]:
    """A line of `samples.jsonl`. `tokens`: a record per segment, of a sample that reached the trainer."""
    return {
        **_named(step, record.key, record.source, chosen.state, chosen.reason),
        "reward": record.reward,
        "score": record.score,
        "is_truncated": record.is_truncated,
        "label": record.label,
        "prompt_text": record.prompt_text,
        "extra": dict(record.extra),
        "segments": [
            _segment(segment, None if tokens is None else tokens[index])
            for index, segment in enumerate(record.segments)
        ],
    }


def written_failure(step: int, key: SampleKey, source: str, reason: str) -> dict[str, Any]:
    """A line for a sample that came to nothing."""
    return {**_named(step, key, source, "failed", reason), "reward": None, "segments": []}


def _named(step: int, key: SampleKey, source: str, state: str, reason: str) -> dict[str, Any]:
    return {"step": step, **vars(key), "source": source, "state": state, "reason": reason}


def _segment(segment: SegmentRecord, tokens: TokenRecord | None) -> dict[str, Any]:
    count = len(segment.text)
    nothing: list[None] = [None] * count
    fates = nothing if tokens is None else tokens.fates or [NO_GRADIENT] * count

    def sampled(values: Sequence[Any]) -> list[Any]:
        rounded = (round(value, 5) if isinstance(value, float) else value for value in values)
        return [value if is_mine else None for value, is_mine in zip(rounded, segment.sampled, strict=True)]

    return {
        "text": segment.text,
        "sampled": segment.sampled,
        "engine_log_probs": sampled(segment.engine_log_probs),
        "trainer_log_probs": sampled(nothing if tokens is None else tokens.trainer_log_probs),
        "advantages": sampled(nothing if tokens is None else tokens.advantages),
        "fates": sampled(fates),
        "versions": sampled(segment.versions),
    }


def gaps(samples: Iterable[tuple[SampleRecord, Sequence[TokenRecord] | None]]) -> list[float]:
    """Between the engine's and the trainer's log-prob, of every sampled token that has both."""
    return [
        abs(engine - trainer)
        for record, tokens in samples
        for segment, mine in zip(record.segments, tokens or (), strict=False)
        for is_sampled, engine, trainer in zip(
            segment.sampled, segment.engine_log_probs, mine.trainer_log_probs, strict=True
        )
        if is_sampled
    ]
