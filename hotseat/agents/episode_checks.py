"""Checks of what an agent asks of the engine, and of the episodes that it returns."""

from __future__ import annotations

import math

import torch

from hotseat.agents.agent import AgentError
from hotseat.agents.episode_jobs import EpisodeJob, Outcome
from hotseat.errors import UserError
from hotseat.types import Completion, Episode, Sampling, ScoredEpisode, Segment


def check_request(job: EpisodeJob, token_ids: list[int], sampling: Sampling | None, turn: int) -> None:
    """Refuse a request that no episode may make. sampling: None leaves its settings to the agent."""
    for name in ("temperature", "top_p", "top_k") if sampling is not None else ():
        asked, expected = getattr(sampling, name), getattr(job.sampling, name)
        if asked != expected:
            raise UserError(
                f"an agent asked for {name} {asked}, but the run samples at {expected}, and the trainer's log-probs are"
                f" taken there: set rollout.{name}, or leave it"
            )
    if turn in job.turns:
        raise AgentError(f"turn {turn} was sampled twice: each call of an episode needs a number of its own")
    if not token_ids:
        raise AgentError("the agent asked to sample from no tokens")


def checked(made: object, job: EpisodeJob) -> Outcome:
    """Return an agent's result after checking that its tokens are the engine's and its reward is a number."""
    episode = made.episode if isinstance(made, ScoredEpisode) else made
    if not isinstance(episode, Episode):
        raise AgentError(f"the agent returned a {type(made).__name__}, neither an Episode nor a ScoredEpisode")
    if episode.key != job.key:
        raise AgentError(f"the agent returned the episode of sample {episode.key}")
    if isinstance(made, ScoredEpisode):
        for name in ("reward", "score"):
            if not math.isfinite(getattr(made, name)):
                raise AgentError(f"the agent returned an episode with a {name} of {getattr(made, name)}")
    lengths = list(episode.turn_lengths)
    num_sampled = episode.num_sampled
    if num_sampled == 0:
        raise AgentError("the agent returned an episode without a sampled token")
    if lengths and sum(lengths) != num_sampled:
        raise AgentError(f"the agent returned turn_lengths {lengths} for {num_sampled} sampled tokens")
    for segment in episode.segments:
        _check_segment(segment, lengths if episode.turn_lengths else None, job.completions)
    return made  # type: ignore[return-value]


def _check_segment(
    segment: Segment, lengths: list[int] | None, completions: dict[tuple[tuple[int, ...], tuple[int, ...]], Completion]
) -> None:
    """Check that each turn of a segment is a completion that the engine made of the tokens before it.

    Removes the lengths of the segment's turns from the front of `lengths`.
    """
    tokens, mask = segment.token_ids.tolist(), segment.mask.tolist()
    at = 0
    while True in mask[at:]:
        at = mask.index(True, at)
        end = at + lengths.pop(0) if lengths else mask.index(False, at) if False in mask[at:] else len(mask)
        completion = completions.get((tuple(tokens[:at]), tuple(tokens[at:end])))
        if completion is None:
            raise AgentError(
                f"the agent returned tokens {at} to {end} of a segment as sampled, but the engine did not sample them"
                " after the tokens before them: let `Transcript` put the episode together"
            )
        log_probs = torch.tensor(completion.log_probs, dtype=torch.float32)
        is_same = torch.equal(segment.log_probs[at:end], log_probs)
        if not is_same or segment.versions[at:end].tolist() != list(completion.versions):
            raise AgentError(f"the agent returned tokens {at} to {end} of a segment with log-probs of its own")
        at = end
