"""Reward servers that speak OpenRLHF's protocol, behind the contract of a reward function."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future

from hotseat.failed import Failed
from hotseat.rewards.addresses import TOKEN
from hotseat.rewards.answers import BadAnswer, Score, read_answer
from hotseat.rewards.posting import Poster, ServerKind, excerpt, read_json
from hotseat.rewards.scorer import SampleGroup, Scorer


class RewardService(Poster, Scorer):
    """Scores groups by one HTTP server or several, `max_open` groups at a time, each in one request; see `Poster`.

    A request is a POST to the URL as given, with `query` (prompt and answer), `prompts` and `labels`, one entry per
    sample. The answer is an object: `rewards` is required, `scores` defaults to it, `extra_logs` is optional. Where no
    server answers, the group's samples are `Failed`. A reward in a good answer that is null or not finite fails its
    sample alone.
    """

    kind = ServerKind("reward server", "reward.url", TOKEN)

    def _submit(self, group: SampleGroup) -> Future[list[Score | Failed]]:
        """Score one group, all samples in one request."""
        body = json.dumps({"query": group.queries, "prompts": group.prompts, "labels": group.labels}).encode()
        names = group.ids
        return self.post(body, names, lambda content, url: _read(content, url, names), lambda why: [why] * len(names))


def _read(content: bytes, url: str, ids: Sequence[str]) -> list[Score | Failed]:
    answer = read_json(content)
    if not isinstance(answer, dict):
        raise BadAnswer(f"its answer is no object with 'rewards': {excerpt(content)}")
    return [
        sample if isinstance(sample, Score) else Failed(f"reward server {url}: {sample.reason}; sample {name}")
        for sample, name in zip(read_answer(answer, len(ids)), ids, strict=True)
    ]
