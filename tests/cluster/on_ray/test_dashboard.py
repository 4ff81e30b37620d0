"""Ray's dashboard, on request: on loopback, for those who have the token."""

import http.client
import subprocess
import sys

import pytest
from environments import own_environment

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TOKEN = "0123456789abcdef" * 2
DRIVER = """
import http.client, sys
from hotseat.cluster import Cluster

with Cluster(num_devices=1, has_dashboard=True) as cluster:
    print(cluster.dashboard_url, flush=True)
    sys.stdin.read()
"""


def ask(address: str, token: str | None) -> int:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=300)
    connection.request(
        "GET", "/nodes?view=summary", headers={} if token is None else {"Authorization": f"Bearer {token}"}
    )
    return connection.getresponse().status


@pytest.mark.long
def test_it_answers_those_who_have_the_token_and_ends_with_the_run():
    environment = {**own_environment(), "RAY_AUTH_TOKEN": TOKEN, "RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-c", DRIVER]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        try:
            address = driver.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:"), address
            assert [ask(address, token) for token in (None, "wrong", TOKEN)] == [401, 403, 200]
            driver.communicate("", timeout=300)
            assert driver.returncode == 0
        finally:
            driver.kill()
    with pytest.raises(OSError):
        ask(address, TOKEN)
