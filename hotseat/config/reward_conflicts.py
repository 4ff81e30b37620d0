"""Checks of the sources of rewards against each other: functions, servers, models, graders and the judge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hotseat.config.presence import has_judge, name_of_function
from hotseat.config.resolved import max_sampled_tokens, reward_parts
from hotseat.config.schema import Config
from hotseat.config.schema.reward_options import GraderConfig
from hotseat.config.urls import as_list, url_problems
from hotseat.registry.estimators import estimator_entry


def _rewards(config: Config) -> Iterator[tuple[str, str]]:
    reward, limit = config.reward, max_sampled_tokens(config)
    if reward.clip is not None and reward.clip[0] >= reward.clip[1]:
        yield "reward.clip", f"{list(reward.clip)}: the first must be below the second"
    if reward.overlong.buffer_length > max(limit, 0):
        yield (
            "reward.overlong.buffer_length",
            f"{reward.overlong.buffer_length} is above the {limit} tokens that an episode may sample: set it to {limit}"
            " or less, or raise rollout.max_new_tokens",
        )
    sources = [name for name in ("function", "url", "model") if getattr(reward, name) is not None]
    if len(sources) > 1:
        yield f"reward.{sources[1]}", f"reward.{sources[0]} is set too: rewards have one source"
    if reward.functions and reward.function is not None:
        yield "reward.functions", "reward.function is set too: put it among them"
    for key, is_added in (("reward.graders", bool(reward.graders)), ("reward.judge", has_judge(config))):
        if reward.model is not None and is_added:
            yield key, "cannot be added to reward.model, which scores alone: set one of them"
    for problem in url_problems(reward.url):
        yield "reward.url", problem
    if reward.sandbox.command is not None and not any("{folder}" in part for part in reward.sandbox.command):
        yield "reward.sandbox.command", "no part of it contains {folder}, the folder with the code to run"


def _graders(config: Config) -> Iterator[tuple[str, str]]:
    reward = config.reward
    names = [name_of_function(each) for each in reward.functions]
    for at, name in enumerate(names):
        if name in names[:at]:
            yield f"reward.functions[{at}].name", f"{name!r} is taken: give each function a name of its own"
    taken = [*names, *(["function"] if reward.function is not None else [])]
    yield from _grader_problems("reward.graders", reward.graders, taken)
    yield from _grader_problems("eval.graders", config.eval.graders, [] if config.eval.reward is None else ["function"])


def _grader_problems(key: str, graders: Iterable[GraderConfig], taken: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield graders that lack an option of their kind, have one of another, or share a name.

    taken: names of the functions that score beside them.
    """
    names = set(taken)
    for number, grader in enumerate(graders):
        at = f"{key}[{number}]"
        for option, kind in {"pattern": "regex", "json_schema": "json", "partial": "code"}.items():
            if option in grader.model_fields_set and grader.kind != kind:
                yield f"{at}.{option}", f"has no effect on kind {grader.kind}; it is for kind {kind}"
            elif getattr(grader, option) is None and grader.kind == kind:
                yield f"{at}.{option}", f"not set: kind {kind} needs it"
        if grader.kind == "code" and "timeout_s" in grader.model_fields_set:
            yield f"{at}.timeout_s", "has no effect on kind code; set reward.sandbox.timeout_s"
        name = grader.name or grader.kind
        if name in names:
            yield f"{at}.name", f"{name!r} is taken: give each grader a name of its own"
        names.add(name)


def _judge(config: Config) -> Iterator[tuple[str, str]]:
    if not has_judge(config):
        return
    reward, judge = config.reward, config.reward.judge
    token = "HOTSEAT_JUDGE_TOKEN"
    for problem in url_problems(judge.url, what="an endpoint", example="http://127.0.0.1:8000/v1", token=token):
        yield "reward.judge.url", problem
    if "?" in "".join(as_list(judge.url)):
        yield "reward.judge.url", "has a query: give the address up to /v1"
    low, high = judge.scale
    if low >= high:
        yield "reward.judge.scale", f"[{low:g}, {high:g}]: the first has to be below the second"
    for word, verdict in (judge.choices or {}).items():
        if word in ("True", "False"):
            read = "yes, on or true" if word == "True" else "no, off or false"
            yield "reward.judge.choices", f"YAML reads {read} as {word}: put the word in quotes, such as 'yes'"
        if not low <= verdict <= high:
            text = f"{word} is {verdict:g}, outside of reward.judge.scale [{low:g}, {high:g}]"
            yield "reward.judge.choices", text
    if judge.choices is not None and not judge.choices:
        yield "reward.judge.choices", "no word in it: give some, or leave it unset for numbers"
    if judge.choices and "pattern" not in judge.model_fields_set:
        yield (
            "reward.judge.pattern",
            "not set, so it finds numbers, and reward.judge.choices are words: set a pattern such as"
            " '(?i)\\b(yes|no)\\b'",
        )
    if judge.votes > 1 and judge.temperature == 0:
        text = f"0: all {judge.votes} votes would be the same; raise it, or ask for one vote"
        yield "reward.judge.temperature", text
    own = {"model", "messages", "temperature", "max_tokens", "seed", "n", "stream"} & set(judge.request)
    if own:
        yield "reward.judge.request", f"{', '.join(sorted(own))}: set by the judge's other options"
    names = {*(grader.name or grader.kind for grader in reward.graders), *map(name_of_function, reward.functions)}
    if reward.function is not None or reward.url:
        names.add("function")
    if judge.name in names:
        yield "reward.judge.name", f"{judge.name!r} is taken: give the judge a name of its own"


def _parts(config: Config) -> Iterator[tuple[str, str]]:
    reward, estimator = config.reward, config.algorithm.estimator
    if not estimator_entry(estimator).compares_parts:
        return
    changes = {
        "reward.overlong.buffer_length": reward.overlong.buffer_length > 0,
        "reward.truncation_penalty": reward.truncation_penalty is not None,
        "components": bool(config.components),
    }
    for key in (key for key, is_set in changes.items() if is_set):
        yield (
            key,
            f"it changes the sum of rewards, and algorithm.estimator {estimator} compares each of them: unset it, and"
            " put what it says into a function of reward.functions",
        )


def missing_parts(config: Config) -> Iterator[tuple[str, str]]:
    """Yield a problem where an estimator compares rewards apart, and fewer than two are known."""
    estimator, parts = config.algorithm.estimator, reward_parts(config)
    if estimator_entry(estimator).compares_parts and len(parts) < 2:
        yield (
            "reward.parts",
            f"of the rewards that algorithm.estimator {estimator} compares apart there is {', '.join(parts) or 'none'}:"
            " give two or more in reward.functions or reward.graders, or name numbers of extra_logs in reward.parts",
        )


REWARD_CHECKS = (_rewards, _graders, _judge, _parts)
