"""Tells errors that would come again from deaths: a process, a node, Ray or a connection that was lost, or hung.

After a death a run can be started again from its newest checkpoint. `HotseatError.comes_again` says it of most errors;
others are known by what libraries write, in the table `DEATHS`.
"""

from __future__ import annotations

import re

from hotseat.errors import BudgetError, DeadlineError, HotseatError, RunError, WorkerError, causes

# What reports a death -> the pattern of its error's type and text.
DEATHS = {
    "Ray": r"\b(RayActorError|ActorDiedError|ActorUnavailableError|NodeDiedError|WorkerCrashedError|RaySystemError"
    r"|LocalRayletDiedError|OwnerDiedError|ObjectLostError|ObjectFetchTimedOutError|ReferenceCountingAssertionError"
    r"|RpcError)\b",
    "Ray's watch over memory": r"\bray\.exceptions\.OutOfMemoryError\b|killed due to the node running low on memory",
    "gloo": r"(?i)gloo.*(timed out|timeout)|timed out waiting \d+ms for (recv|send)",
    "torch's store": r"(?i)\b(DistNetworkError|DistStoreError)\b|wait timeout after|failed to recv, got 0 bytes"
    r"|socket timeout",
    "NCCL": r"\bnccl(RemoteError|SystemError|InternalError)\b|remote process exited or there was a network error"
    r"|caught collective operation timeout|NCCL communicator was aborted",
    "the GPU": r"(?i)uncorrectable (nvlink|ecc)|unspecified launch failure|fallen off the bus|cudaErrorECC"
    r"|an illegal memory access",
    "vLLM": r"\bEngineDeadError\b|EngineCore encountered an issue|engine core proc\S* .*died|RPC call to \w+ timed out",
    "a connection": r"(?im)connection (closed|reset) by peer"
    r"|^(ConnectionResetError|ConnectionAbortedError|BrokenPipeError|BrokenProcessPool)\b",
}
_PATTERNS = {of: re.compile(pattern, re.MULTILINE) for of, pattern in DEATHS.items()}


def comes_again(error: BaseException) -> bool:
    """Tell whether a run that this error ended would meet it again when it is resumed."""
    chain = list(causes(error))
    if any(isinstance(each, RunError) and each.is_death for each in chain):
        return False
    for each in chain:
        if isinstance(each, HotseatError) and each.comes_again is not None:
            return each.comes_again
    return reporter_of("\n".join(map(_text, chain))) is None


def is_loss(error: BaseException) -> bool:
    """Tell whether an error means that a process was lost or hung, so that the run can continue with another one."""
    is_choice = any(isinstance(each, BudgetError) for each in causes(error))  # it resumes with another config
    return not is_choice and not comes_again(error)


def who_died(error: BaseException) -> tuple[str | None, set[str]]:
    """Return the group of which a process died, if the error says so, and all groups whose processes it names."""
    named: dict[str, None] = {}  # an ordered set
    death = None
    for each in causes(error):
        if isinstance(each, WorkerError) and each.group:
            named[each.group] = None
        if isinstance(each, DeadlineError):
            named |= dict.fromkeys(name.partition(" rank ")[0] for name in each.awaited)
        if isinstance(each, RunError) and each.is_death and named:
            death = list(named)[-1]
    return death, set(named)


def reporter_of(text: str) -> str | None:
    """Return who reports a death in the text of an error; None if it tells of none."""
    return next((of for of, pattern in _PATTERNS.items() if pattern.search(text)), None)


def _text(error: BaseException) -> str:
    kind = type(error)
    name = kind.__name__ if isinstance(error, HotseatError) or kind.__module__ == "builtins" else _full_name(kind)
    remote = error.remote_traceback if isinstance(error, WorkerError) else ""
    return f"{name}: {error}\n{remote}"


def _full_name(kind: type[BaseException]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
