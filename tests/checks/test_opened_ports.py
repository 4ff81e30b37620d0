"""What a run opens to others is refused unless they need a token."""

import pytest

from hotseat.checks.opened_ports import dashboard, endpoint
from hotseat.checks.stage import CheckContext
from hotseat.config import loads

CONFIG = "task: rl\nactor: {model: model}\ndata: {path: prompts.jsonl}\nreward: {function: reward.py}\n"
TOKENS = ("HOTSEAT_METRICS_TOKEN", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")


@pytest.fixture(autouse=True)
def no_tokens(monkeypatch):
    for name in TOKENS:
        monkeypatch.delenv(name, raising=False)


def problems(check, *overrides):
    return [str(problem) for problem in check(CheckContext(config=loads(CONFIG, overrides)))]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "trainer.example"])
def test_metrics_are_served_to_other_machines_with_a_token_only(monkeypatch, host):
    options = "log.endpoint.port=0", f'log.endpoint.host="{host}"'
    [problem] = problems(endpoint, *options)
    assert problem.startswith(f"log.endpoint.host: {host}: other machines could read the metrics")
    assert "set the environment variable HOTSEAT_METRICS_TOKEN" in problem
    monkeypatch.setenv("HOTSEAT_METRICS_TOKEN", "secret")
    assert problems(endpoint, *options) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_metrics_of_this_machine_need_none(host):
    assert problems(endpoint, "log.endpoint.port=9400", f'log.endpoint.host="{host}"') == []
    assert problems(endpoint) == []


def test_a_dashboard_without_a_token_is_refused(monkeypatch):
    assert problems(dashboard) == []
    [problem] = problems(dashboard, "cluster.ray_dashboard=true")
    assert problem.startswith("cluster.ray_dashboard: ")
    assert "RAY_AUTH_TOKEN" in problem
    for name in TOKENS[1:4]:
        with monkeypatch.context() as changed:
            changed.setenv(name, "secret")
            assert problems(dashboard, "cluster.ray_dashboard=true") == []


def test_the_dashboard_of_an_existing_cluster_is_its_own_matter(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    [problem] = problems(dashboard, "cluster.ray_dashboard=true")
    assert "RAY_ADDRESS names a cluster" in problem
