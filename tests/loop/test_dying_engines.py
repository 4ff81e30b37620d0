"""An engine that dies costs only its own requests: the others take them, and its replacement gets weights first.

In process: a group whose ranks can die as processes do. `reliability/test_overlap_kills.py` kills a real one.
"""

import math
import threading
from collections import Counter

import pytest
from loop_cases import rl_yaml, same, weights
from test_overlap import long_answers, trained

from hotseat.cluster import local
from hotseat.config import loads
from hotseat.errors import WorkerError
from hotseat.loop.run import start
from hotseat.observe import read_lines

pytestmark = pytest.mark.slow

TWO_ENGINES = "{runtime: local, inventory: 1x3, component_placement: {actor: 0, rollout: 1-2}}"


SHARED = "{runtime: local, inventory: 1x1, component_placement: {actor: 0, rollout: '@actor'}}"
PARTLY_SHARED = "{runtime: local, inventory: 1x2, component_placement: {actor: 0, rollout: 0-1}}"
CARRIED = "{staleness: 1, order: arrival, in_flight: recompute}"
PROMPTS_PER_STEP = SAMPLES_PER_PROMPT = 4


class Engines(local.LocalGroup):
    """Engines that record their requests. The last one dies from its `fatal`-th `deadly` call on, with requests open.

    From then on every call to it fails, as do those under way, until it is restarted. For requests to be open at every
    pause, however late threads run, one that is to die at a pause answers no more prompts than a step takes until the
    first pause, and as many more until the next; the last of these answers waits until another prompt has come.
    """

    def __init__(self, launch, rank_env, fatal: int, deadly: str = "fetch"):
        self.fatal = fatal
        self.deadly = deadly
        self.num_groups = PROMPTS_PER_STEP if deadly == "pause" else math.inf  # answered until the next pause
        self._groups: dict[str, int] = {}  # the place of each
        self._num_answered = 0
        self._withheld: list = []  # completions
        self.dead: set[int] = set()
        self.submitted: list[tuple[int, str]] = []  # the rank, and the sample and turn
        self.log: list[str] = []
        self._num_deadly = 0
        self._num_open = 0  # requests that the last engine has, and has not answered
        self._lock = threading.Lock()
        super().__init__(launch, rank_env)

    def alive(self) -> list[bool]:
        return [rank not in self.dead for rank in self.ranks]

    def restart(self, rank, *, timeout_s=None):
        super().restart(rank)
        self.dead.discard(rank)

    def _run(self, rank, called, method, args, *more, **kwargs):
        with self._lock:
            if called is self._objects[rank]:  # or its process is gone, and it reaches none
                self._record(rank, method, args)
        self._raise_if_dead(rank)
        if method == "fetch" and self._withheld:
            args = (args[0], 0.01)  # seconds in which another completion may come
        result = super()._run(rank, called, method, args, *more, **kwargs)
        self._raise_if_dead(rank)
        if method == "fetch" and rank == len(self.ranks) - 1:
            with self._lock:
                result = self._answers(result)
                self._num_open -= len(result)
        return result

    def _answers(self, completions: list) -> list:
        """Choose what may be answered by now among these and those withheld."""
        if self.num_groups == math.inf:
            return completions
        num_answers = self.num_groups * SAMPLES_PER_PROMPT - (len(self._groups) <= self.num_groups)
        answers: list = []
        completions, self._withheld = self._withheld + completions, []
        for each in completions:
            is_due = self._groups[group_of(each.request_id)] < self.num_groups and self._num_answered < num_answers
            self._num_answered += is_due
            (answers if is_due else self._withheld).append(each)
        return answers

    def _record(self, rank: int, method: str, args: tuple) -> None:
        if rank in self.dead:
            return
        if method == "submit":
            self.submitted += [(rank, each.id.partition("#")[0]) for each in args[1]]
            for each in args[1]:
                self._groups.setdefault(group_of(each.id), len(self._groups))
            self._num_open += len(args[1]) if rank == len(self.ranks) - 1 else 0
        if method in ("submit", "finish_load"):
            self.log.append(f"{method} {rank}")
        if method == self.deadly and rank == len(self.ranks) - 1:
            self._num_deadly += 1
            if method == "pause":
                self.num_groups += PROMPTS_PER_STEP
            if self.fatal and self._num_deadly >= self.fatal and self._num_open > 0:
                self.fatal = 0
                self.dead.add(rank)
                self._withheld, self.num_groups = [], math.inf
                self.log.append("died")

    def _raise_if_dead(self, rank: int) -> None:
        if rank in self.dead:
            error = WorkerError(f"{self.name} rank {rank} died")
            error.is_death = True
            raise error


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
        "",
        pytest.param("{staleness: 1}", marks=pytest.mark.long),
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
        (PARTLY_SHARED, "fetch"),
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


def group_of(request_id: str) -> str:
    """Name the group of a request, whose id is pass/prompt/sample/turn#number."""
    return request_id.rpartition("#")[0].rsplit("/", 2)[0]
