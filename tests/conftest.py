"""For all tests: what one leaves in the environment is not found by the next in the same process; examples that
hypothesis makes may take their time, because others work on the same cores."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")

# DeepSpeed reads the first from there, so its backend sets it; by it accelerate takes itself for one of several ranks.
LEFT_BEHIND = ("LOCAL_RANK", "DS_ACCELERATOR")


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in LEFT_BEHIND}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
