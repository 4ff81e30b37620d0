"""Servers for tests of what asks them."""

import pytest


@pytest.fixture
def opened():
    """Closes everything that is put there."""
    things = []
    yield things
    for thing in reversed(things):
        thing.close()


@pytest.fixture
def server(opened):
    """Starts servers."""
    from reward_servers import FakeServer

    def start(*arguments) -> FakeServer:
        opened.append(FakeServer(*arguments))
        return opened[-1]

    return start
