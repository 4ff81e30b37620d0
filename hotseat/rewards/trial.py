"""Trial call of a reward function on one group before a run starts. Needs neither torch nor transformers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hotseat.failed import Failed
from hotseat.processes import ProtocolError, WorkerDied, WorkerTimeout
from hotseat.rewards.answers import BadAnswer, read_answer
from hotseat.rewards.function import locate
from hotseat.rewards.function_process import LoadedTooLate, NotLoaded, Task, Tracebacks, WorkerProcess
from hotseat.rewards.scorer import NamedArguments

_MISTAKE = "NameError: name "  # an undefined name is a mistake whatever the function was called with
_ABSENT_PACKAGES = ("ImportError", "ModuleNotFoundError")


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
) -> Trial:
    """Load a reward function in a process of its own, call it once, and end the process.

    timeout_s: for loading and calling together. Output of the function is dropped. extra_path: folders that the file
    may import from, besides those of this process. columns: of the row, for a function that is called by names; one
    is not called without them.
    """
    file, function = locate(path)
    message = {"queries": list(queries), "prompts": list(prompts), "labels": list(labels), "seed": seed}
    if columns is not None:
        answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
        ids = [list(answer.encode()) for answer in answers]  # no tokenizer is loaded yet
        message["named"] = vars(NamedArguments(columns, answers, ids))
    deadline_s = time.monotonic() + timeout_s
    process = None
    task = Task(str(file), function, max_memory_bytes, is_silent=True, extra_path=tuple(extra_path))
    try:
        try:
            process = WorkerProcess(task, timeout_s, lambda: False, Tracebacks(lambda text: None))
        except (WorkerDied, ProtocolError) as error:
            return Trial("broken", f"cannot be loaded: {error}")
        if process.takes_names and columns is None:
            return Trial("scored")
        answer = process.call(message, deadline_s - time.monotonic())
    except (WorkerTimeout, LoadedTooLate):
        return Trial("late")
    except NotLoaded as error:
        is_absent = str(error).startswith(_ABSENT_PACKAGES)
        return Trial("not here" if is_absent else "broken", f"cannot be loaded: {error}")
    except (WorkerDied, ProtocolError) as error:
        return Trial("failed", str(error))
    finally:
        if process is not None:
            process.end()
    return _judged(answer, len(queries))


def _judged(answer: dict[str, Any], num_samples: int) -> Trial:
    if "error" in answer:
        problem = f"raised {answer['error']}"
        if answer.get("is_mistake") or answer["error"].startswith(_MISTAKE):
            return Trial("broken", problem)
        return Trial("not here" if answer["error"].startswith(_ABSENT_PACKAGES) else "failed", problem)
    returned = answer["result"]
    try:
        samples = read_answer(returned, num_samples)
    except BadAnswer as error:
        return Trial("unusable", str(error), returned)
    failed = [sample for sample in samples if isinstance(sample, Failed)]
    if len(failed) == num_samples:
        return Trial("failed", f"scored no sample: {failed[0].reason}", returned)
    return Trial("scored", returned=returned)
