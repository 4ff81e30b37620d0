"""Checks of graders, of the judge, and of the sandbox for generated code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from hotseat.checks.plans import is_cluster_there
from hotseat.checks.stage import Context
from hotseat.config.presence import has_judge
from hotseat.errors import Problem
from hotseat.rewards.graders import grader_problem, graders_of, package_problem
from hotseat.rewards.rubrics import pattern_problem, rubric_problem
from hotseat.rewards.sandbox import Sandbox, SandboxSettings


def graders(context: Context) -> Iterator[Problem]:
    """Find graders that cannot work: by a pattern, a schema, or a package that is missing here."""
    config = context.config
    if not config.has_rollouts:
        return
    for key, made in (
        ("reward.graders", graders_of(config.reward.graders)),
        ("eval.graders", graders_of(config.eval.graders)),
    ):
        for number, grader in enumerate(made):
            problem = grader_problem(grader)
            if problem is None and not is_cluster_there(config):
                problem = package_problem(grader.kind)
            if problem is not None:
                yield Problem(f"{key}[{number}]", problem)


def judge(context: Context) -> Iterator[Problem]:
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
    if (problem := pattern_problem(judge.pattern)) is not None:
        yield Problem("reward.judge.pattern", problem)


def sandbox(context: Context) -> Iterable[Problem]:
    """Run a small program in the sandbox if a grader uses it, and note its limits. Raises if it does not work here.

    Rollout hosts, which may be on other machines, do the same when they start.
    """
    config = context.config
    graders = (*config.reward.graders, *config.eval.graders)
    if config.has_rollouts and not is_cluster_there(config) and any(grader.kind == "code" for grader in graders):
        context.show("running a program in the sandbox, to see that it works")
        context.notes.append(Sandbox(SandboxSettings.of_config(config.reward.sandbox)).probe())
    return ()
