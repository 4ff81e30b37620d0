"""The endpoint of a run, asked by HTTP on loopback, and read by Prometheus' own parser."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from paused_runs import wait_for
from prometheus_client.parser import text_string_to_metric_families

from hotseat.connections import bound_at
from hotseat.observe import QuietLimits, RunProgress
from hotseat.observe.endpoint import Endpoint

TIMEOUT_S = 120.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Served:
    """A run's progress, and what its endpoint answers."""

    def __init__(self, token: str | None = None):
        self.clock = Clock()
        self.progress = RunProgress(20, None, QuietLimits(30.0, 600.0), self.clock)
        self.said: list[str] = []
        self._bound = bound_at("127.0.0.1", 0)
        self.port = self._bound.getsockname()[1]
        machine = {"machine/cpu": 0.25, "machine/device 0/busy": 0.5}
        labels = {"run": 'a "b"\\c', "task": "rl"}
        self.endpoint = Endpoint(self._bound, self.progress, labels, lambda: machine, self.note, token)

    def note(self, text: str, kind: str = "note") -> None:
        self.said.append(text)

    def ask(self, path: str, token: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        connection.request("GET", path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def values(self) -> dict[tuple[str, str], float]:
        """Return all values, by family and the last of their labels."""
        status, text = self.ask("/metrics")
        assert status == 200
        families = text_string_to_metric_families(text)
        return {
            (sample.name, sample.labels.get("name", sample.labels.get("kind", ""))): sample.value
            for family in families
            for sample in family.samples
        }


@contextmanager
def served(token: str | None = None) -> Iterator[Served]:
    made = Served(token)
    with made.endpoint:
        yield made


def test_prometheus_reads_every_metric_of_the_step_under_its_own_name():
    with served() as run:
        odd = {'a "quoted"\nname\\': 1.0, "Größe/é": 2.0, "lone \ud800": 3.0, "a/b": 4.0, "a_b": 5.0}
        run.progress.begin("rollout")
        run.progress.end_step(7, {"reward": 0.5, "nan": float("nan"), "inf": float("inf"), "word": "x", **odd})
        run.progress.note("warning")
        values = run.values()
        assert values["hotseat_step", ""] == 7
        assert values["hotseat_steps", ""] == 20
        assert values["hotseat_healthy", ""] == 1
        assert values["hotseat_events_total", "warning"] == 1
        assert values["hotseat_metric", "reward"] == 0.5
        assert values["hotseat_metric", "inf"] == float("inf")
        assert values["hotseat_metric", "nan"] != values["hotseat_metric", "nan"]
        kept = {name: value for (family, name), value in values.items() if family == "hotseat_metric"}
        assert {name: kept[name] for name in odd if "lone" not in name} == {
            name: value for name, value in odd.items() if "lone" not in name
        }
        assert kept["lone ?"] == 3.0
        assert ("hotseat_metric", "word") not in values
        assert values["hotseat_machine", "cpu"] == 0.25
        assert values["hotseat_machine", "device 0/busy"] == 0.5
        [family] = [each for each in text_string_to_metric_families(run.ask("/metrics")[1]) if "run_info" in each.name]
        assert family.samples[0].labels["run"] == 'a "b"\\c'


def test_health_is_bad_once_there_was_no_progress_for_too_long():
    with served() as run:
        for _ in range(2):
            run.progress.begin("update")
        run.clock.now = 29.0
        status, text = run.ask("/healthz")
        assert (status, json.loads(text)["status"]) == (200, "ok")
        run.clock.now = 31.0
        status, text = run.ask("/healthz")
        facts = json.loads(text)
        assert status == 503
        assert (facts["status"], facts["doing"], facts["limit_s"]) == ("stuck", "update", 30.0)
        assert facts["without_progress_s"] == 31.0
        run.progress.begin("sync")
        assert run.ask("/healthz")[0] == 200


def test_with_a_token_nothing_is_told_without_it():
    with served("secret-token") as run:
        run.progress.end_step(7, {"reward": 0.5})
        for given in (None, "other", "secret-toke", "secret-token2"):
            status, text = run.ask("/metrics", given)
            assert status == 401
            assert "reward" not in text
            assert json.loads(run.ask("/healthz", given)[1]) == {"status": "ok"}
        assert "reward" in run.ask("/metrics", "secret-token")[1]
        assert json.loads(run.ask("/healthz", "secret-token")[1])["step"] == 7


@pytest.mark.slow
def test_clients_that_send_nothing_keep_nobody_out():
    with served() as run, ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", run.port), TIMEOUT_S))
        assert run.ask("/healthz")[0] == 200


@pytest.mark.slow
def test_a_client_that_never_reads_its_answer_is_left():
    """The answer is larger than what both ends of a connection buffer, and its connection is ended."""
    with served() as run, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", run.port))
        run.progress.end_step(1, {f"metric {number} {'x' * 500}": 1.0 for number in range(20_000)})
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        slow.settimeout(TIMEOUT_S)
        # Nothing is read before the other end has given up: what comes then ends before the answer does.
        assert run.ask("/healthz")[0] == 200
        assert wait_for(lambda: run.endpoint.num_connections == 0, TIMEOUT_S)
        received = 0
        with pytest.raises(OSError):  # noqa: PT012
            while part := slow.recv(1 << 16):
                received += len(part)
            raise OSError("closed")
        assert received < 10_000_000


@pytest.mark.parametrize("path", ["/", "/metrics/../etc/passwd", "/nothing"])
def test_there_is_nothing_else(path):
    with served() as run:
        assert run.ask(path)[0] == 404


def test_it_closes_at_once_with_clients_connected():
    with served() as run, socket.create_connection(("127.0.0.1", run.port), TIMEOUT_S):
        run.endpoint.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", run.port), TIMEOUT_S)
        run.endpoint.close()
        assert run.said == []
