"""Looks for the reward servers of a run before anything heavy starts, by connecting to them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from hotseat.checks.stage import Context
from hotseat.config.presence import has_judge, has_judge_engine
from hotseat.config.urls import as_list
from hotseat.errors import Problem
from hotseat.rewards.addresses import bearer_token, connect_problems
from hotseat.rewards.rubrics import TOKEN as JUDGE_TOKEN
from hotseat.words import without_url_secrets

_CONNECT_TIMEOUT_S = 10.0


def servers(context: Context) -> Iterator[Problem]:
    """Connect to every reward server and judge. Finds that none can be reached, and notes those that cannot.

    Nothing is sent: OpenRLHF's servers have no route but the one that scores.
    """
    config = context.config
    if not config.has_rollouts:
        return
    if config.reward.url is not None:
        bearer_token()  # raises for one that cannot be sent
        yield from _unreachable("reward server", "reward.url", as_list(config.reward.url), context)
    if has_judge(config) and not has_judge_engine(config):
        bearer_token(name=JUDGE_TOKEN)
        yield from _unreachable("judge", "reward.judge.url", as_list(config.reward.judge.url), context)


def _unreachable(kind: str, key: str, urls: Sequence[str], context: Context) -> Iterator[Problem]:
    context.show(f"connecting to {', '.join(map(without_url_secrets, urls))}")
    problems = connect_problems(urls, _CONNECT_TIMEOUT_S)
    lines = "\n".join(f"  {key} {without_url_secrets(url)}: {problem}" for url, problem in problems.items())
    if problems and os.environ.get("RAY_ADDRESS"):
        context.notes.append(f"warning: from this machine, which need not be the one that scores:\n{lines}")
    elif problems and len(problems) < len(urls):
        context.notes.append(f"warning: the other {kind}s do the work until these can be reached:\n{lines}")
    elif problems:
        text = f"this run cannot start: no {kind} can be reached\n{lines}\nstart it, or correct {key}"
        yield Problem("", text)
