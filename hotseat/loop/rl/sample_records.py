"""Lines of `samples.jsonl`: chooses the samples of a step to record, and formats them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotseat.types import SampleKey

if TYPE_CHECKING:
    from hotseat.loop.rl.collect import Collected
    from hotseat.loop.workers.group_facts import GroupFacts
from hotseat.loop.workers.records import NO_GRADIENT, SampleRecord, TokenRecord


@dataclass(frozen=True)
class ChosenSample:
    """A sample to be recorded, and its fate."""

    key: SampleKey
    state: str  # trained or dropped
    reason: str = ""


def choose(collected: Collected, step: int, count: int) -> list[ChosenSample]:
    """Choose up to `count` samples that are learned from and `count` that were dropped, from all over the step."""
    kept = [ChosenSample(key, "trained") for key in _spread_out([*collected.groups], step, count)]
    reasons = {facts.key: reason for facts, reason in collected.dropped}
    keys = _spread_out([facts for facts, _ in collected.dropped], step, count)
    return kept + [ChosenSample(key, "dropped", reasons[key.epoch, key.prompt]) for key in keys]


def _spread_out(groups: Sequence[GroupFacts], step: int, count: int) -> list[SampleKey]:
    """Return a sample each of `count` groups at equal distances; the position in the group changes with the step."""
    groups = [facts for facts in groups if facts.samples]
    picked = [groups[index * len(groups) // count] for index in range(count)] if groups else []
    keys = [
        SampleKey(facts.epoch, facts.prompt, facts.samples[(step + index) % len(facts.samples)])
        for index, facts in enumerate(picked)
    ]
    return list(dict.fromkeys(keys))


def failures(collected: Collected, step: int, count: int) -> list[dict[str, Any]]:
    """Return lines for the first samples that failed."""
    groups = [*collected.groups, *(facts for facts, _ in collected.dropped)]
    failed_samples = [(facts, sample, why) for facts in groups for sample, why in facts.failures]
    return [
        {
            **_named(step, SampleKey(facts.epoch, facts.prompt, sample), facts.source, "failed", why),
            "reward": None,
            "segments": [],
        }
        for facts, sample, why in failed_samples[:count]
    ]


def written(
    step: int, chosen: ChosenSample, record: SampleRecord, tokens: Sequence[TokenRecord] | None
) -> dict[str, Any]:
    """Return a line of `samples.jsonl`. `tokens`: a record per segment; None if the trainer did not get the sample."""
    segments = [
        _segment(segment, None if tokens is None else tokens[index]) for index, segment in enumerate(record["segments"])
    ]
    return {
        **_named(step, chosen.key, record["source"], chosen.state, chosen.reason),
        **record,
        "segments": segments,
    }


def _named(step: int, key: SampleKey, source: str, state: str, reason: str) -> dict[str, Any]:
    return {"step": step, **vars(key), "source": source, "state": state, "reason": reason}


def _segment(segment: dict[str, list[Any]], tokens: TokenRecord | None) -> dict[str, Any]:
    count = len(segment["text"])
    nothing: list[None] = [None] * count
    fates = nothing if tokens is None else tokens.fates or [NO_GRADIENT] * count

    def sampled(values: Sequence[Any]) -> list[Any]:
        rounded = (round(value, 5) if isinstance(value, float) else value for value in values)
        return [value if is_mine else None for value, is_mine in zip(rounded, segment["sampled"], strict=True)]

    return {
        "text": segment["text"],
        "sampled": segment["sampled"],
        "engine_log_probs": sampled(segment["engine_log_probs"]),
        "trainer_log_probs": sampled(nothing if tokens is None else tokens.trainer_log_probs),
        "advantages": sampled(nothing if tokens is None else tokens.advantages),
        "fates": sampled(fates),
        "versions": sampled(segment["versions"]),
    }


def gaps(samples: Iterable[tuple[SampleRecord, Sequence[TokenRecord] | None]]) -> list[float]:
    """Return |engine log-prob - trainer log-prob| of every sampled token that has both."""
    return [
        abs(engine - trainer)
        for record, tokens in samples
        for segment, mine in zip(record["segments"], tokens or (), strict=False)
        for is_sampled, engine, trainer in zip(
            segment["sampled"], segment["engine_log_probs"], mine.trainer_log_probs, strict=True
        )
        if is_sampled
    ]
