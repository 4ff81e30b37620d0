"""An engine that dies costs only its own requests: the others take them, and its replacement gets weights first.

In process: a group whose ranks can die as processes do. `runs/test_overlap_kills.py` kills a real one.
"""

from collections import Counter

import pytest
from dying_engines import SHARED, Engines
from loop_cases import rl_yaml, same, weights
from test_overlap import long_answers, trained

from hotseat.cluster import local
from hotseat.config import loads
from hotseat.loop.run import start
from hotseat.observe import read_lines

pytestmark = pytest.mark.slow

TWO_ENGINES = "{runtime: local, inventory: 1x3, component_placement: {actor: 0, rollout: 1-2}}"


PARTLY_SHARED = "{runtime: local, inventory: 1x2, component_placement: {actor: 0, rollout: 0-1}}"
CARRIED = "{staleness: 1, order: arrival, in_flight: recompute}"


@pytest.fixture
def run(task, monkeypatch):
    """Return a function that makes a run with two engines, of which one dies, and returns its engines."""
    plain = local.LocalGroup

    def make(name: str, overlap: str, fatal: int, cluster: str = TWO_ENGINES, deadly: str = "fetch", **more) -> Engines:
        made: list[Engines] = []

        def group(launch, rank_env):
            if launch.name != "rollout":
                return plain(launch, rank_env)
            made.append(Engines(launch, rank_env, fatal, deadly))
            return made[0]

        monkeypatch.setattr("hotseat.cluster.local.LocalGroup", group)
        start(loads(rl_yaml(task, name=name, overlap=overlap, cluster=cluster, **more), ["train.num_episodes=2"]))
        return made[0]

    return make


@pytest.mark.parametrize(
    "overlap",
    [
        *(pytest.param(overlap, marks=pytest.mark.long) for overlap in ("", "{staleness: 1}")),
        "{staleness: 2, order: arrival, in_flight: keep}",
    ],
)
def test_only_the_requests_of_a_dead_engine_are_sent_again(task, run, overlap):
    calm = run("calm", overlap, fatal=0)
    assert set(Counter(name for _, name in calm.submitted).values()) == {1}
    engines = run("run", overlap, fatal=3)
    sent = Counter(name for _, name in engines.submitted)
    again = {name for name, count in sent.items() if count > 1}
    assert sent.keys() == {name for _, name in calm.submitted}
    assert again
    assert again <= {name for rank, name in engines.submitted if rank == 1}
    assert max(sent.values()) == 2
    assert trained(task, "run") == trained(task, "calm")
    # It has its weights before it gets another request.
    after = engines.log[engines.log.index("died") + 1 :]
    assert "submit 1" not in after[: after.index("finish_load 1")]
    last = list(read_lines(task / "runs" / "run" / "metrics.jsonl"))[-1]
    assert last["engine_restarts"] == 1
    if overlap:
        assert last["groups_begun_again"] == 0
        assert last["requests_sent_again"] >= len(again)  # some had not reached the engine yet
    if "arrival" not in overlap:
        assert same(weights(task, "calm"), weights(task, "run"))


@pytest.mark.parametrize(
    ("cluster", "deadly"),
    [
        (SHARED, "pause"),
        pytest.param(PARTLY_SHARED, "fetch", marks=pytest.mark.long),
        pytest.param(SHARED, "fetch", marks=pytest.mark.long),
        pytest.param(PARTLY_SHARED, "pause", marks=pytest.mark.long),
    ],
)
def test_on_shared_devices_an_engine_dies_in_its_turn_or_at_its_end(task, run, cluster, deadly):
    """Requests that were carried over are sent again, to the other engine or to the replacement, and none is lost."""
    engines = run("run", CARRIED, fatal=2, cluster=cluster, deadly=deadly, **long_answers(task))
    assert "died" in engines.log
    sent = Counter(name for _, name in engines.submitted)
    assert {name for name, count in sent.items() if count > 1}
    counts = trained(task, "run")
    assert len(counts) == 4 * 4 * 4
    assert set(counts.values()) == {1}
    after = engines.log[engines.log.index("died") + 1 :]
    last_rank = len(engines.ranks) - 1
    assert f"submit {last_rank}" not in after[: after.index(f"finish_load {last_rank}")]
    last = list(read_lines(task / "runs" / "run" / "metrics.jsonl"))[-1]
    assert last["engine_restarts"] == 1
    assert last["groups_begun_again"] == 0
    assert last["samples_failed"] == 0
    assert last["staleness_max"] <= 1
