"""Conflicts of `reward`: its sources, graders and judge."""

from __future__ import annotations

from collections.abc import Iterable

from hotseat.config.annotations import RL
from hotseat.config.conflicts.conflict_list import Problems, conflict
from hotseat.config.presence import has_judge
from hotseat.config.resolved import max_sampled_tokens
from hotseat.config.schema import Config, GraderConfig
from hotseat.config.urls import as_list, url_problems


@conflict(RL)
def clip_without_range(config: Config) -> Problems:
    clip = config.reward.clip
    if clip is not None and clip[0] >= clip[1]:
        yield "reward.clip", f"{list(clip)}: the first must be below the second"


@conflict(RL)
def penalty_before_the_first_token(config: Config) -> Problems:
    buffer, limit = config.reward.overlong.buffer_length, max_sampled_tokens(config)
    if buffer > max(limit, 0):
        yield (
            "reward.overlong.buffer_length",
            f"{buffer} is above the {limit} tokens that an episode may sample: set it to {limit} or less, or raise"
            " rollout.max_new_tokens",
        )


@conflict(RL)
def several_sources(config: Config) -> Problems:
    sources = [name for name in ("function", "url", "model") if getattr(config.reward, name) is not None]
    if len(sources) > 1:
        yield f"reward.{sources[1]}", f"reward.{sources[0]} is set too: rewards have one source"
    if config.reward.model is not None and config.reward.graders:
        yield "reward.graders", "cannot be added to reward.model, which scores alone: set one of them"
    if config.reward.model is not None and has_judge(config):
        yield "reward.judge", "cannot be added to reward.model, which scores alone: set one of them"


@conflict(RL)
def addresses_of_reward_servers(config: Config) -> Problems:
    for problem in url_problems(config.reward.url):
        yield "reward.url", problem


@conflict(RL)
def graders_of_training(config: Config) -> Problems:
    yield from _grader_problems("reward.graders", config.reward.graders, config.reward.function)


@conflict(RL)
def graders_of_evaluation(config: Config) -> Problems:
    yield from _grader_problems("eval.graders", config.eval.graders, config.eval.reward)


def _grader_problems(key: str, graders: Iterable[GraderConfig], function: str | None) -> Problems:
    """Yield graders that lack an option of their kind, have one of another, or share a name.

    function: the file that scores beside them, if any.
    """
    names: set[str] = set()
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
        if name in names or (name == "function" and function is not None):
            yield f"{at}.name", f"{name!r} is taken: give each grader a name of its own"
        names.add(name)


@conflict(RL)
def sandbox_without_folder(config: Config) -> Problems:
    command = config.reward.sandbox.command
    if command is not None and not any("{folder}" in part for part in command):
        yield "reward.sandbox.command", "no part of it contains {folder}, the folder with the code to run"


@conflict(RL)
def address_of_the_judge(config: Config) -> Problems:
    url = config.reward.judge.url
    if has_judge(config):
        token = "HOTSEAT_JUDGE_TOKEN"
        for problem in url_problems(url, what="an endpoint", example="http://127.0.0.1:8000/v1", token=token):
            yield "reward.judge.url", problem
        if "?" in "".join(as_list(url)):
            yield "reward.judge.url", "has a query: give the address up to /v1"


@conflict(RL)
def scale_of_the_judge(config: Config) -> Problems:
    judge = config.reward.judge
    low, high = judge.scale
    if not has_judge(config):
        return
    if low >= high:
        yield "reward.judge.scale", f"[{low:g}, {high:g}]: the first has to be below the second"
    for word, verdict in (judge.choices or {}).items():
        if word in ("True", "False"):
            read = "yes, on or true" if word == "True" else "no, off or false"
            yield "reward.judge.choices", f"YAML reads {read} as {word}: put the word in quotes, such as 'yes'"
        if not low <= verdict <= high:
            yield (
                "reward.judge.choices",
                f"{word} is {verdict:g}, outside of reward.judge.scale [{low:g}, {high:g}]",
            )
    if judge.choices is not None and not judge.choices:
        yield "reward.judge.choices", "no word in it: give some, or leave it unset for numbers"
    if judge.choices and "pattern" not in judge.model_fields_set:
        yield (
            "reward.judge.pattern",
            "not set, so it finds numbers, and reward.judge.choices are words: set a pattern such as"
            " '(?i)\\b(yes|no)\\b'",
        )


@conflict(RL)
def equal_votes(config: Config) -> Problems:
    judge = config.reward.judge
    if has_judge(config) and judge.votes > 1 and judge.temperature == 0:
        yield (
            "reward.judge.temperature",
            f"0: all {judge.votes} votes would be the same; raise it, or ask for one vote",
        )


@conflict(RL)
def requests_that_options_make(config: Config) -> Problems:
    judge = config.reward.judge
    own = {"model", "messages", "temperature", "max_tokens", "seed", "n", "stream"} & set(judge.request)
    if has_judge(config) and own:
        yield "reward.judge.request", f"{', '.join(sorted(own))}: set by the judge's other options"


@conflict(RL)
def name_of_the_judge(config: Config) -> Problems:
    reward = config.reward
    names = {grader.name or grader.kind for grader in reward.graders}
    if reward.function is not None or reward.url:
        names.add("function")
    if has_judge(config) and reward.judge.name in names:
        yield "reward.judge.name", f"{reward.judge.name!r} is taken: give the judge a name of its own"
