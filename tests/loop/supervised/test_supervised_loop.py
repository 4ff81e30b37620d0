"""Ranks of a supervised run share its batches by the plan for the cluster, whatever was assumed before it was known."""

from types import SimpleNamespace

import pytest
from loop_cases import make_task, sft_yaml

from hotseat.checks import plans
from hotseat.config import loads
from hotseat.errors import BatchError
from hotseat.loop import opening
from hotseat.loop.inputs import supervised_inputs
from hotseat.loop.opening import ClusterContext
from hotseat.loop.supervised import supervised_loop
from hotseat.planning.config_plan import make_plan

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config for all devices of an existing cluster."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    text = sft_yaml(make_task(tmp_path), cluster="{component_placement: {actor: all}}")
    config = loads(text)
    assert plans.is_cluster_there(config)
    return config


def test_each_rank_gets_its_share_by_the_devices_that_the_cluster_has(config, monkeypatch):
    launched = {}
    monkeypatch.setattr(supervised_loop.Readiness, "watch", lambda *_: None)
    cluster = SimpleNamespace(launch=lambda *_, **options: launched.update(options))
    inputs = supervised_inputs(config)  # assumes eight
    context = ClusterContext(config, cluster, make_plan(config, "1x2"), has_new_budgets=False)
    supervised_loop.launch_ranks(context, inputs, SimpleNamespace(progress=None))
    assert [(each["rank"], each["num_ranks"]) for each in launched["per_rank"]] == [(0, 2), (1, 2)]


def test_batches_are_judged_by_the_devices_that_the_cluster_has(config):
    four = config.with_options({"train.batch_size": 4, "train.micro_batch_size": 1})
    supervised_inputs(four)  # would not divide over the eight devices that are assumed
    opening.check_plan(four, make_plan(four, "1x4"))
    with pytest.raises(BatchError, match="train.batch_size 4 is not a multiple of 3 ranks"):
        opening.check_plan(four, make_plan(four, "1x3"))
