"""Records of samples: a few of each step, with facts for every token, for people to read (`samples.jsonl`).

Rollout hosts record the episode (`record_of`), ranks of the actor what they learned from its tokens (`Recorder`).
`loop.rl.sample_log` makes a line of both.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hotseat.algorithms.distillation import Divergence
from hotseat.data.frames import film_of
from hotseat.loop.workers.experience import rewarded_lengths
from hotseat.loop.workers.losses import ADVANTAGES, PolicyObjective
from hotseat.train.backend import Outputs
from hotseat.types import GIVEN_VERSION, MicroBatch, Prompt, ScoredEpisode, Segment
from hotseat.vision import is_packed
from hotseat.words import label_text

MAX_FRAMES = 200  # of a film
NO_GRADIENT, SKIPPED = "no gradient", "skipped"


# A sample as its rollout host records it: what is written of it, but for its fate and what the trainer made of it. Its
# segments have an entry per token.
SampleRecord = dict[str, Any]


@dataclass
class TokenRecord:
    """A token sequence as the trainer learned from it, an entry per token. `fates` is empty until then."""

    trainer_log_probs: list[float]
    advantages: list[float]
    fates: list[str] = field(default_factory=list)


def record_of(sample: ScoredEpisode, prompt: Prompt, tokenizer: Any) -> SampleRecord:
    """Return a record of a sample. Film: what the policy saw in a simulator, as an animated image."""
    episode = sample.episode
    images = [image for segment in episode.segments for image in segment.images]
    film = film_of([image for image in images if is_packed(image)][:MAX_FRAMES])
    files = [image for image in dict.fromkeys([*prompt.images, *images]) if not is_packed(image)]
    return {
        "source": prompt.source,
        "reward": sample.reward,
        "score": sample.score,
        "is_truncated": episode.is_truncated,
        "label": None if label_text(prompt.label) is None else prompt.label,
        "prompt_text": prompt.text,
        **({"images": files} if files else {}),
        **({"film": film} if film is not None else {}),
        "extra": dict(sample.extra),
        "waited_s": None if episode.facts is None else _rounded(episode.facts.waited_s),
        "took_s": None if episode.facts is None else _rounded(episode.facts.took_s),
        "turns": _turns_of(sample),
        "segments": [
            {
                "text": token_texts(segment.token_ids.tolist(), tokenizer),
                "sampled": segment.mask.tolist(),
                "engine_log_probs": _of_engine(segment),
                "versions": segment.versions.tolist(),
            }
            for segment in episode.played_segments
        ],
    }


def _of_engine(segment: Segment) -> list[float | None]:
    """Return the engine's log-prob of each token; None for those that the data gave."""
    values, versions = segment.log_probs.tolist(), segment.versions.tolist()
    return [None if version == GIVEN_VERSION else value for value, version in zip(values, versions, strict=True)]


def _turns_of(sample: ScoredEpisode) -> list[dict[str, Any]]:
    episode = sample.episode
    facts = episode.facts.turns if episode.facts is not None else ()
    known = facts if len(facts) == len(episode.turn_lengths) else (None,) * len(episode.turn_lengths)
    return [
        {
            "length": length,
            "reward": reward,
            "asked_s": None if fact is None else _rounded(fact.asked_s),
            "answered_s": None if fact is None else _rounded(fact.answered_s),
            "tool_calls": [] if fact is None else list(fact.tool_calls),
        }
        for length, reward, fact in zip(episode.turn_lengths, _rewards_of(sample), known, strict=True)
    ]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _rewards_of(sample: ScoredEpisode) -> tuple[float | None, ...]:
    """Return the reward of each turn, which in a simulator may be that of several actions; None where unknown."""
    turn_lengths, lengths = sample.episode.turn_lengths, rewarded_lengths(sample)
    if not lengths:
        return (None,) * len(turn_lengths)
    if lengths == turn_lengths:
        return sample.turn_rewards
    left = iter(sample.turn_rewards)
    return tuple(sum(itertools.islice(left, length // lengths[0])) for length in turn_lengths)


def token_texts(token_ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text that each token adds. A character that several tokens make up belongs to the last of them."""
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
    """Records on one rank what becomes of the tokens of chosen samples during an update."""

    def __init__(self, batch: MicroBatch, log_probs: Mapping[str, list[Tensor]]):
        """Take the trainer's `log_probs` before the update, for the segments of each chosen sample on this rank."""
        self.tokens: dict[str, list[TokenRecord]] = {}
        for name, values in _segments(batch, batch.fields[ADVANTAGES]):
            if name in log_probs:
                mine = self.tokens.setdefault(name, [])
                mine.append(TokenRecord(log_probs[name][len(mine)].tolist(), values.tolist()))

    def mark_skipped(self, batches: Sequence[MicroBatch]) -> None:
        """Mark the samples of an update that was not finite, and so was skipped."""
        for name in {name for batch in batches for name in batch.sample_ids} & self.tokens.keys():
            for segment in self.tokens[name]:
                segment.fates = [SKIPPED] * len(segment.fates)

    def record(self, batch: MicroBatch, clipped: Tensor, corrected: Tensor) -> None:
        """Record which tokens of chosen samples were clipped or corrected."""
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
class RecordedObjective:
    """Objective that reports to a recorder which tokens it clipped or corrected."""

    objective: PolicyObjective
    recorder: Recorder

    @property
    def needs_entropy(self) -> bool:
        return self.objective.needs_entropy

    @property
    def divergence(self) -> Divergence | None:
        return self.objective.divergence

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        terms = self.objective.terms(outputs, batch)
        self.recorder.record(batch, terms.clipped, terms.corrected)
        return terms.loss, terms.metrics


def _segments(batch: MicroBatch, values: Tensor) -> list[tuple[str, Tensor]]:
    lengths = (batch.offsets[1:] - batch.offsets[:-1]).tolist()
    return list(zip(batch.sample_ids, values.split(lengths), strict=True))
