"""Graders: built-in verdicts on answers, and their weighted sum as the reward."""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotseat.closing import on_failure
from hotseat.errors import RunError, UserError
from hotseat.failed import Failed, NotApplicable
from hotseat.processes import Closed, ProtocolError, WorkerDied, WorkerTimeout
from hotseat.rewards.answers import Score
from hotseat.rewards.builtin import answer_of
from hotseat.rewards.code import grade_code
from hotseat.rewards.function_process import FunctionProcess, NotLoaded, OwnerThread, Tracebacks
from hotseat.rewards.sandbox import Sandbox, SandboxSettings
from hotseat.rewards.scorer import SampleGroup, Scorer, to_stderr, when_all_are_done
from hotseat.words import label_text

if TYPE_CHECKING:
    from hotseat.config.schema.reward_options import GraderConfig

_FILE = Path(__file__).with_name("text_graders.py")
# Function in text_graders.py for each kind that compares text.
_FUNCTIONS = {"exact": "exact", "number": "number", "math": "math", "regex": "regex", "json": "json_schema"}
_PACKAGES = {"math": ("math_verify", "math-verify"), "json": ("jsonschema", "jsonschema")}
_START_TIMEOUT_S = 120.0
_MAX_KILLS = 3

Part = list[Score | Failed]  # what one grader gives to a group, sample by sample
_Answers = list[tuple[str, str | None]]  # of a group, with their labels as text


@dataclass(frozen=True)
class Grader:
    """One grader of a reward. name: of its verdicts in metrics and samples. timeout_s: for each answer.

    pattern: of `regex`. json_schema: of `json`. partial: of `code`, the share of passed tests counts.
    """

    kind: str
    name: str
    weight: float = 1.0
    timeout_s: float = 5.0
    pattern: str | None = None
    json_schema: Any = None
    partial: bool = False


def graders_of(graders: Sequence[GraderConfig]) -> tuple[Grader, ...]:
    return tuple(Grader(**{**dict(grader), "name": grader.name or grader.kind}) for grader in graders)


def grader_problem(grader: Grader) -> str | None:
    """Return why a grader cannot work, as far as its options show; None if it can."""
    if grader.kind == "regex":
        try:
            re.compile(grader.pattern or "")
        except (re.error, OverflowError, RecursionError) as error:
            return f"pattern {grader.pattern!r} is no regular expression of Python's re: {error}"
    if grader.kind == "json" and package_problem(grader.kind) is None:
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for

        try:
            validator_for(grader.json_schema).check_schema(grader.json_schema)
        except SchemaError as error:
            where = "/".join(map(str, error.absolute_path))
            return f"json_schema is no JSON schema: {error.message}{f' (at {where})' if where else ''}"
    return None


def package_problem(kind: str) -> str | None:
    """Return which package a kind of grader lacks on this machine; None: it lacks none."""
    module, package = _PACKAGES.get(kind, (None, None))
    if module is None or find_spec(module) is not None:
        return None
    return f"kind {kind} needs the package {package}: pip install 'hotseat[graders]'"


class Graders(Scorer):
    """Scores groups by several graders; the reward is the weighted sum of their verdicts, each of which is logged.

    A `function`, or servers, score with them, with weight 1. `beside`: scorers whose rewards count as the verdicts of
    graders with the names and weights that come with them: several functions, and a model as judge. The constructor
    starts everything once: a missing package, or a sandbox that does not work on this machine, raises `UserError`.
    Graders that compare text have a process each, which is ended and replaced if it does not answer in time. Generated
    code runs in the sandbox, `max_concurrent` programs at a time. A sample that a grader cannot judge is `Failed`, with
    the grader's name and the reason.

    One thread takes groups in the order of `submit` and has their texts judged; threads of a pool wait for the sandbox.
    `close` wakes all of them.
    """

    def __init__(
        self,
        graders: Sequence[Grader],
        *,
        sandbox: SandboxSettings | None = None,
        function: Scorer | None = None,
        beside: Sequence[tuple[Grader, Scorer]] = (),
        max_memory_bytes: int | None = None,
    ):
        self._texts = [grader for grader in graders if grader.kind in _FUNCTIONS]
        self._codes = [grader for grader in graders if grader.kind == "code"]
        self._function = function
        self._beside = tuple(beside)
        self._stack = ExitStack()
        for scorer in (*(each for _, each in self._beside), function):
            if scorer is not None:
                self._stack.callback(scorer.close)
        for grader in graders:
            problem = package_problem(grader.kind) or grader_problem(grader)
            if problem is not None:
                raise UserError(f"grader {grader.name}: {problem}")
        if self._codes:
            settings = sandbox or SandboxSettings()
            self._sandbox = Sandbox(settings)
            self._sandbox.probe()
            self._pool = ThreadPoolExecutor(settings.max_concurrent or os.cpu_count() or 1, "sandbox")
            self._stack.callback(self._pool.shutdown, cancel_futures=True)
            self._stack.callback(self._sandbox.close)
        self._judges = [_Judge(each, max_memory_bytes, lambda: self._owner.is_closed) for each in self._texts]
        self._owner = OwnerThread("graders", self._judges, self._judge_texts, lambda job: _closed())
        atexit.register(self.close)
        with on_failure(self.close):
            self._owner.start()

    def score(self, group: SampleGroup) -> Future[list[Score | Failed]]:
        answers = [answer_of(query, prompt) for query, prompt in zip(group.queries, group.prompts, strict=True)]
        labels = [label_text(label) for label in group.labels]
        with self._owner.lock:
            texts = self._owner.submit(list(zip(answers, labels, strict=True)))
            samples = list(zip(answers, group.labels, strict=True))
            codes = [
                (grader, [self._pool.submit(self._run_code, grader, *sample) for sample in samples])
                for grader in self._codes
            ]
        own = None if self._function is None else self._function.score(group)
        beside = [(grader, scorer.score(group)) for grader, scorer in self._beside]
        waits_for: list[Future[Any]] = [texts, *(future for _, futures in codes for future in futures)]
        waits_for += [*(future for _, future in beside), *([] if own is None else [own])]
        nothing: Score | Failed = Score(0.0, 0.0)
        if beside and not (self._texts or self._codes):
            nothing = NotApplicable("no reward function applies to it")  # until one does

        def sums() -> list[Score | Failed]:
            try:
                parts = list(zip(self._texts, texts.result(), strict=True))
                parts += [(grader, [future.result() for future in futures]) for grader, futures in codes]
                parts += [(grader, future.result()) for grader, future in beside]
                rewards: Part = [*map(_of_function, own.result())] if own else [nothing] * len(answers)
                for grader, verdicts in parts:
                    each = zip(rewards, verdicts, group.ids, strict=True)
                    rewards = [add_verdict(reward, grader, verdict, name) for reward, verdict, name in each]
                return rewards
            except CancelledError:
                raise _closed() from None

        return when_all_are_done(waits_for, sums)

    def close(self) -> None:
        """End all processes of graders. Unfinished futures raise an error. A second call does nothing."""
        atexit.unregister(self.close)
        if self._owner.close():
            self._stack.close()

    def _run_code(self, grader: Grader, answer: str, label: Any) -> Score | Failed:
        try:
            verdict = grade_code(self._sandbox, answer, label, partial=grader.partial)
        except Closed:
            raise _closed() from None
        return verdict if isinstance(verdict, Failed) else Score(verdict, verdict)

    # --- in the owner thread ------------------------------------------------------------------------------------------

    def _judge_texts(self, answers: _Answers) -> list[Part]:
        return [[judge.judge(answer, label) for answer, label in answers] for judge in self._judges]


def _closed() -> RunError:
    return RunError("graders: closed before they scored all samples")


def _of_function(reward: Score | Failed) -> Score | Failed:
    """Return a reward of the function with its value among the numbers to log."""
    if isinstance(reward, Failed):
        return reward
    return replace(reward, extra={**reward.extra, "function": reward.reward})


class _Judge(FunctionProcess):
    """One grader that compares text, and its process. Used by the thread that owns it."""

    def __init__(self, grader: Grader, max_memory_bytes: int | None, is_closed: Callable[[], bool]):
        function, tracebacks = _FUNCTIONS[grader.kind], Tracebacks(to_stderr)
        super().__init__(str(_FILE), function, _START_TIMEOUT_S, is_closed, tracebacks, max_memory_bytes)
        self._grader = grader
        self._options = {"pattern": grader.pattern, "json_schema": grader.json_schema}

    def start(self) -> None:
        """Start the process, and have it import what it needs."""
        try:
            super().start()
            assert self.process is not None
            answer = self.process.call({"queries": [], "prompts": [], "labels": []}, _START_TIMEOUT_S)
        except (NotLoaded, WorkerDied, ProtocolError, WorkerTimeout) as error:
            self.end()
            why = f"it did not start within {_START_TIMEOUT_S:g} s" if isinstance(error, WorkerTimeout) else str(error)
            raise UserError(f"grader {self._grader.name}: {why}") from None
        if "error" in answer:
            self.end()
            raise UserError(f"grader {self._grader.name}: cannot be used: {answer['error']}")

    def judge(self, answer: str, label: str | None) -> Score | Failed:
        message = {"queries": [answer], "prompts": [self._options], "labels": [label]}
        reason = ""
        for _ in range(_MAX_KILLS + 1):
            try:
                result = self.call(message, self._grader.timeout_s)
            except WorkerDied as died:
                reason = str(died)
                if died.is_from_outside:
                    continue
                return Failed(reason)
            except WorkerTimeout:
                return Failed(f"no verdict within {self._grader.timeout_s:g} s")
            except ProtocolError as error:
                return Failed(str(error))
            except UserError as error:
                return Failed(f"could not be started again: {error}")
            if "error" in result:
                return Failed(f"raised {result['error']}")
            [[verdict, problem]] = result["result"]
            return Failed(problem) if verdict is None else Score(verdict, verdict)
        return Failed(f"{reason}, {_MAX_KILLS + 1} times (is there enough memory?)")


def add_verdict(total: Score | Failed, grader: Grader, verdict: Score | Failed, sample: str) -> Score | Failed:
    """Add the verdict of one more grader to the reward of a sample. A failure stays one.

    What does not apply to the sample adds nothing; nor do its other numbers, if some grader has their name.
    """
    if isinstance(verdict, NotApplicable):
        return total
    if isinstance(total, NotApplicable):
        total = Score(0.0, 0.0, {})
    if isinstance(total, Failed):
        return total
    if isinstance(verdict, Failed):
        named = "" if f"sample {sample}" in verdict.reason else f" (sample {sample})"
        return Failed(f"grader {grader.name}: {verdict.reason}{named}")
    if grader.name in total.extra:
        return Failed(f"extra_logs of the reward function has {grader.name!r}, the name of a grader: rename one")
    reward = total.reward + grader.weight * verdict.reward
    score = total.score + grader.weight * verdict.score
    return Score(reward, score, {**verdict.extra, **total.extra, grader.name: verdict.reward})
