"""Whether this machine can run the sandbox, found out by running it; tests that need it are skipped with the reason."""

import functools

import pytest

from hotseat.errors import UserError
from hotseat.rewards import Sandbox, SandboxSettings


@functools.cache
def problem() -> str | None:
    try:
        Sandbox(SandboxSettings()).probe()
    except UserError as error:
        return str(error)
    return None


@pytest.fixture
def needs_sandbox():
    reason = problem()
    if reason is not None:
        pytest.skip(reason)
