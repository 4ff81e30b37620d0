"""Checks of graders, of the judge, of the sandbox for generated code, and of reward servers, by connecting to them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hotseat.checks.plans import is_cluster_there
from hotseat.checks.stage import CheckContext, problem_of
from hotseat.config.presence import has_judge, has_judge_engine
from hotseat.config.urls import as_list
from hotseat.errors import Problem
from hotseat.rewards.addresses import bearer_token, connect_problems
from hotseat.rewards.graders import grader_problem, graders_of, package_problem
from hotseat.rewards.rubrics import TOKEN as JUDGE_TOKEN
from hotseat.rewards.rubrics import pattern_problem, rubric_problem
from hotseat.rewards.sandbox import Sandbox, SandboxSettings
from hotseat.words import without_url_secrets

_CONNECT_TIMEOUT_S = 10.0


def graders(context: CheckContext) -> Iterator[Problem]:
    """Find graders that cannot work: by a pattern, a schema, or a package that is missing here."""
    config = context.config
    if not config.has_rollouts:
        return
    for key, made in (
        ("reward.graders", graders_of(config.reward.graders)),
        ("eval.graders", graders_of(config.eval.graders)),
    ):
        for number, grader in enumerate(made):
            lacking = None if is_cluster_there(config) else package_problem(grader.kind)
            yield from problem_of(f"{key}[{number}]", grader_problem(grader) or lacking)


def judge(context: CheckContext) -> Iterator[Problem]:
    """Find a rubric or a pattern that cannot work."""
    judge = context.config.reward.judge
    if not has_judge(context.config) or judge.rubric is None:
        return
    try:
        text = Path(judge.rubric).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        yield Problem("reward.judge.rubric", f"{judge.rubric}: {reason}")
    else:
        if (problem := rubric_problem(text)) is not None:
            yield Problem("reward.judge.rubric", f"{judge.rubric}: {problem}")
    yield from problem_of("reward.judge.pattern", pattern_problem(judge.pattern))


def sandbox(context: CheckContext) -> Iterable[Problem]:
    """Run a small program in the sandbox if a grader uses it, and note its limits. Raises if it does not work here.

    Rollout hosts, which may be on other machines, do the same when they start.
    """
    config = context.config
    graders = (*config.reward.graders, *config.eval.graders)
    if config.has_rollouts and not is_cluster_there(config) and any(grader.kind == "code" for grader in graders):
        context.show("running a program in the sandbox, to see that it works")
        context.notes.append(Sandbox(SandboxSettings.of_config(config.reward.sandbox)).probe())
    return ()


def servers(context: CheckContext) -> Iterator[Problem]:
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


def _unreachable(kind: str, key: str, urls: Sequence[str], context: CheckContext) -> Iterator[Problem]:
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
