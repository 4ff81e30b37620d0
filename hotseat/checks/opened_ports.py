"""Checks of what a run opens for people and programs outside of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from hotseat.checks.plans import is_cluster_there
from hotseat.checks.stage import CheckContext
from hotseat.config.urls import is_loopback
from hotseat.errors import Problem
from hotseat.rewards.addresses import METRICS_TOKEN, bearer_token


def endpoint(context: CheckContext) -> Iterator[Problem]:
    """Find an endpoint that others could reach without a token."""
    section = context.config.log.endpoint
    token = bearer_token(name=METRICS_TOKEN)
    if section.port is not None and token is None and not is_loopback(section.host):
        yield Problem(
            "log.endpoint.host",
            f"{section.host}: other machines could read the metrics, and there is no token: set the environment"
            f" variable {METRICS_TOKEN} here and where they are read, or serve this machine alone (127.0.0.1)",
        )


def dashboard(context: CheckContext) -> Iterator[Problem]:
    """Find a dashboard of Ray that nobody could open, or that is another cluster's matter."""
    if not context.config.cluster.ray_dashboard:
        return
    if is_cluster_there(context.config):
        yield Problem("cluster.ray_dashboard", "RAY_ADDRESS names a cluster that has, or has not, its own: remove it")
    elif not any(os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        text = "the dashboard asks for a token: choose one, and set the environment variable RAY_AUTH_TOKEN to it"
        yield Problem("cluster.ray_dashboard", text)
