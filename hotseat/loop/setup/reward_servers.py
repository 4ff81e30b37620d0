"""Looks for the reward servers of a run before anything heavy starts, by connecting to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from hotseat.config import Config
from hotseat.config.roles import has_judge, has_judge_engine
from hotseat.config.urls import as_list
from hotseat.errors import UserError
from hotseat.rewards.addresses import bearer_token, connect_problems
from hotseat.rewards.rubrics import TOKEN as JUDGE_TOKEN
from hotseat.words import without_url_secrets

_CONNECT_TIMEOUT_S = 10.0


def check_reward_servers(config: Config, show: Callable[[str], object]) -> list[str]:
    """Connect to every reward server and judge, and return notes for the user. Raises if none can be reached.

    Nothing is sent: OpenRLHF's servers have no route but the one that scores. show: is called with a line on what
    happens now.
    """
    if config.task != "rl":
        return []
    notes = []
    if config.reward.url is not None:
        bearer_token()  # raises for one that cannot be sent
        notes += _check("reward server", "reward.url", as_list(config.reward.url), show)
    if has_judge(config) and not has_judge_engine(config):
        bearer_token(name=JUDGE_TOKEN)
        notes += _check("judge", "reward.judge.url", as_list(config.reward.judge.url), show)
    return notes


def _check(kind: str, key: str, urls: Sequence[str], show: Callable[[str], object]) -> list[str]:
    show(f"connecting to {', '.join(map(without_url_secrets, urls))}")
    problems = connect_problems(urls, _CONNECT_TIMEOUT_S)
    if not problems:
        return []
    lines = "\n".join(f"  {key} {without_url_secrets(url)}: {problem}" for url, problem in problems.items())
    if os.environ.get("RAY_ADDRESS"):
        return [f"warning: from this machine, which need not be the one that scores:\n{lines}"]
    if len(problems) < len(urls):
        return [f"warning: the other {kind}s do the work until these can be reached:\n{lines}"]
    raise UserError(f"this run cannot start: no {kind} can be reached\n{lines}\nstart it, or correct {key}")
