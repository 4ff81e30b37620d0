"""A user's reward function, in worker processes of its own: it may raise, hang or crash without ending the run."""

from __future__ import annotations

import atexit
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hotseat.errors import RunError, UserError
from hotseat.extensions import REWARD_FUNCTIONS
from hotseat.failed import Failed, NotApplicable
from hotseat.processes import ProtocolError, WorkerDied, WorkerTimeout
from hotseat.rewards import builtin
from hotseat.rewards.answers import BadAnswer, Score, read_answer
from hotseat.rewards.function_process import (
    FunctionProcess,
    LoadedTooLate,
    NotLoaded,
    OwnerThread,
    Tracebacks,
)
from hotseat.rewards.scorer import NamedArguments, SampleGroup, Scorer, named_samples, to_stderr
from hotseat.user_functions import located, shown_place
from hotseat.words import label_text, quantity

_MAX_KILLS = 3
_MISTAKE = "NameError: name "  # an undefined name is a mistake whatever the function was called with
_ABSENT_PACKAGES = ("ImportError", "ModuleNotFoundError")


class RewardFunction(Scorer):
    """Scores groups with `reward_func(queries, prompts, labels)` from a file, one group at a time.

    A function with a parameter `completions` is of TRL's form: it is called by names, with the columns of the row.

    `path` is `FILE.py`, `FILE.py:FUNCTION` or the name of a built-in one (`exact_match`, `number_match`). The file is
    loaded in a process of its own before the constructor returns: a file that cannot be used raises `UserError`.
    `answers.read_answer` describes what the function may return; its output goes to standard error.

    If the function raises, crashes, takes longer than `timeout_s` or does not return a finite number for each sample,
    it is called again, `retries` times at most, in a fresh process if the last one may be damaged. After that, samples
    without a reward are `Failed`, with file, function and sample named. A worker that was killed from outside is no
    failure of the function: the group is sent again, three times at most.

    With a `seed`, Python's, numpy's and torch's generators are seeded before each call, from it and the samples' ids,
    so that a group that is scored again gets the same random numbers in any process.

    kwargs: further arguments of the function, by name.

    say: is called with notes for the user: the first time-out, and tracebacks. None: they go to standard error.

    The owner thread takes jobs in the order of `submit`, gives one list to each future, and waits for its worker at
    most `timeout_s`, for a starting one `start_timeout_s`; `close` wakes it within a tenth of a second.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        timeout_s: float = 60.0,
        retries: int = 2,
        start_timeout_s: float = 120.0,
        max_memory_bytes: int | None = None,
        seed: int | None = None,
        kwargs: Mapping[str, Any] | None = None,
        say: Callable[[str], object] | None = None,
    ):
        file, function = locate(str(path))
        self.name = f"{shown_place(file)}: {function}"
        self._is_builtin = str(path) in builtin.FUNCTIONS
        self.timeout_s = timeout_s
        self.retries = retries
        self._seed = seed
        self._has_been_late = False
        self._say = say or to_stderr
        tracebacks = Tracebacks(self._show)
        self._worker = FunctionProcess(
            str(file),
            function,
            start_timeout_s,
            lambda: self._owner.is_closed,
            tracebacks,
            max_memory_bytes,
            kwargs=kwargs or {},
        )
        self._owner = OwnerThread(self.name, [self._worker], self._score, self._unfinished)
        atexit.register(self.close)
        try:
            self._owner.start(start_timeout_s + 10.0)
        except BaseException as error:
            self.close()
            if isinstance(error, NotLoaded | WorkerDied | ProtocolError):
                raise UserError(f"{self.name}: cannot be used as a reward function: {error}") from None
            raise

    def score(self, group: SampleGroup) -> Future[list[Score | Failed]]:
        labels = [label_text(label) for label in group.labels] if self._is_builtin else group.labels
        message: dict[str, Any] = {"queries": group.queries, "prompts": group.prompts, "labels": labels}
        if group.named is not None:
            message["named"] = group.named.message
        if self._seed is not None:
            text = f"{self._seed}/{'/'.join(group.ids)}"
            message["seed"] = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        return self._owner.submit((message, group.ids))

    @property
    def pids(self) -> list[int]:
        """Id of the running worker process, if there is one."""
        process = self._worker.process
        return [] if process is None else [process.pid]

    def close(self) -> None:
        """End the worker and all that it started. Unfinished futures raise an error. A second call does nothing."""
        atexit.unregister(self.close)
        self._owner.close()

    def _unfinished(self, job: tuple[dict[str, Any], list[str]]) -> RunError:
        return RunError(f"{self.name}: closed before it scored {named_samples(job[1])}")

    # --- in the owner thread ------------------------------------------------------------------------------------------

    def _show(self, text: str) -> None:
        to_stderr(text)
        if self._say is not to_stderr:
            self._say(text)

    def _score(self, job: tuple[dict[str, Any], list[str]]) -> list[Score | Failed]:
        message, ids = job
        best: list[Score | Failed] | None = None
        reason, num_attempts, num_kills = "", 0, 0
        while num_attempts <= self.retries:
            try:
                samples = self._ask(message)
            except WorkerDied as died:
                if died.is_from_outside and num_kills < _MAX_KILLS:
                    num_kills += 1
                    continue
                again = f", killed {num_kills + 1} times (is there enough memory?)" if died.is_from_outside else ""
                reason = f"{died}{again}"
            except WorkerTimeout:
                reason = f"did not answer within {self.timeout_s:g} s"
                self._warn_of_first_time_out(ids, is_last=num_attempts == self.retries)
            except NotLoaded as error:
                reason = f"could not be loaded again: {error}"
            except (BadAnswer, ProtocolError) as error:
                reason = str(error)
            else:
                if best is None or _num_failed(samples) < _num_failed(best):
                    best = samples
                if _num_failed(best) == 0:
                    break
            num_attempts += 1
        attempts = quantity(num_attempts, "attempt")
        if best is None:
            return [Failed(f"{self.name}: {reason} ({attempts}; {named_samples(ids)})")] * len(ids)
        return [self._named(sample, name, attempts) for sample, name in zip(best, ids, strict=True)]

    def _named(self, sample: Score | Failed, name: str, attempts: str) -> Score | Failed:
        """Name a failure with file, function, sample and number of attempts."""
        if isinstance(sample, Score):
            return sample
        made = "" if isinstance(sample, NotApplicable) else f"{attempts}; "
        return replace(sample, reason=f"{self.name}: {sample.reason} ({made}sample {name})")

    def _ask(self, message: dict[str, Any]) -> list[Score | Failed]:
        worker = self._worker
        answer = worker.call(message, self.timeout_s)
        if "error" in answer:
            limit = worker.max_memory_bytes
            is_full = limit is not None and answer["error"].startswith(("MemoryError", "_ArrayMemoryError"))
            hint = f" (it may take {limit / 2**30:g} GiB: reward.max_memory_gib)" if is_full and limit else ""
            raise BadAnswer(f"raised {answer['error']}{hint}")
        return read_answer(answer["result"], len(message["queries"]), is_optional=worker.takes_names)

    def _warn_of_first_time_out(self, ids: list[str], is_last: bool) -> None:
        is_first, self._has_been_late = not self._has_been_late, True
        if is_first:
            then = "they have failed" if is_last else "it is called again in another process"
            self._say(
                f"{self.name}: no answer within {self.timeout_s:g} s (reward.timeout_s) for {named_samples(ids)};"
                f" {then}. Later time-outs are counted, not shown"
            )


def locate(path: str) -> tuple[Path, str]:
    if path in builtin.FUNCTIONS:
        return Path(builtin.__file__), path
    if path in REWARD_FUNCTIONS:
        return Path(__file__).parents[1] / REWARD_FUNCTIONS[path], path
    file, name = located(path)
    function = name or "reward_func"
    if not file.is_file():
        raise UserError(
            f"reward function: no such file: {file}; give a Python file with {function}(queries, prompts, labels), or"
            f" one of {', '.join(builtin.FUNCTIONS)}"
        )
    return file, function


def _num_failed(samples: list[Score | Failed]) -> int:
    return sum(isinstance(sample, Failed) and not isinstance(sample, NotApplicable) for sample in samples)


# --- a trial call before a run starts ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """Result of a trial call.

    outcome: `scored`; `broken`, no call could succeed; `not here`, as `broken`, but another machine may have the
    package that is missing; `unusable`, the returned value is not one reward per sample; `failed`, a call for other
    samples may succeed; `late`, no answer before the deadline.
    problem: what went wrong, with the line if it is known. returned: the returned value, converted to JSON's types.
    """

    outcome: Literal["scored", "broken", "not here", "unusable", "failed", "late"]
    problem: str = ""
    returned: Any = None


def try_reward(
    path: str,
    queries: Sequence[str],
    prompts: Sequence[str],
    labels: Sequence[Any],
    *,
    timeout_s: float,
    max_memory_bytes: int | None = None,
    seed: int = 0,
    extra_path: Sequence[str] = (),
    columns: Mapping[str, Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Trial:
    """Load a reward function in a process of its own, call it once, and end the process.

    timeout_s: for loading and calling together. Output of the function is dropped. extra_path: folders that the file
    may import from, besides those of this process. columns: of the row, for a function that is called by names; one
    is not called without them. kwargs: its further arguments.
    """
    file, function = locate(path)
    message = {"queries": list(queries), "prompts": list(prompts), "labels": list(labels), "seed": seed}
    if columns is not None:
        answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
        ids = [list(answer.encode()) for answer in answers]  # no tokenizer is loaded yet
        message["named"] = NamedArguments(columns, answers, ids).message
    deadline_s = time.monotonic() + timeout_s
    options: dict[str, Any] = {"max_memory_bytes": max_memory_bytes, "is_silent": True, "extra_path": tuple(extra_path)}
    options["kwargs"] = kwargs or {}
    worker = FunctionProcess(str(file), function, timeout_s, lambda: False, Tracebacks(lambda text: None), **options)
    try:
        try:
            worker.start()
        except (WorkerDied, ProtocolError) as error:
            return Trial("broken", f"cannot be loaded: {error}")
        if worker.takes_names and columns is None:
            return Trial("scored")
        answer = worker.call(message, deadline_s - time.monotonic())
    except (WorkerTimeout, LoadedTooLate):
        return Trial("late")
    except NotLoaded as error:
        is_absent = str(error).startswith(_ABSENT_PACKAGES)
        return Trial("not here" if is_absent else "broken", f"cannot be loaded: {error}")
    except (WorkerDied, ProtocolError) as error:
        return Trial("failed", str(error))
    finally:
        worker.end()
    if "error" in answer:
        problem = f"raised {answer['error']}"
        if answer.get("is_mistake") or answer["error"].startswith(_MISTAKE):
            return Trial("broken", problem)
        return Trial("not here" if answer["error"].startswith(_ABSENT_PACKAGES) else "failed", problem)
    returned = answer["result"]
    try:
        samples = read_answer(returned, len(queries))
    except BadAnswer as error:
        return Trial("unusable", str(error), returned)
    failed = [sample for sample in samples if isinstance(sample, Failed)]
    if len(failed) == len(queries):
        return Trial("failed", f"scored no sample: {failed[0].reason}", returned)
    return Trial("scored", returned=returned)
