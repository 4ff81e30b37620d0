"""Looks for the reward servers of a run before anything heavy starts, by connecting to them."""

from __future__ import annotations

import os
from collections.abc import Callable

from hotseat.config import Config
from hotseat.config.urls import as_list
from hotseat.errors import UserError
from hotseat.rewards.addresses import bearer_token, connect_problems

_CONNECT_TIMEOUT_S = 10.0


def check_reward_servers(config: Config, show: Callable[[str], object]) -> list[str]:
    """Connect to every reward server, and return notes for the user. Raises `UserError` if none can be reached.

    Nothing is sent: OpenRLHF's servers have no route but the one that scores. show: is called with a line on what
    happens now.
    """
    urls = as_list(config.reward.url)
    if config.task != "rl" or not urls:
        return []
    bearer_token()  # raises for one that cannot be sent
    show(f"connecting to {', '.join(urls)}")
    problems = connect_problems(urls, _CONNECT_TIMEOUT_S)
    if not problems:
        return []
    lines = "\n".join(f"  reward.url {url}: {problem}" for url, problem in problems.items())
    if os.environ.get("RAY_ADDRESS"):
        return [f"warning: from this machine, which need not be the one that scores:\n{lines}"]
    if len(problems) < len(urls):
        return [f"warning: the other reward servers do the work until these can be reached:\n{lines}"]
    raise UserError(f"this run cannot start: no reward server can be reached\n{lines}\nstart it, or correct reward.url")
