"""Several rollout hosts: each group has one host, and nobody else can tell how many there are."""

import pytest
from loop_cases import rl_yaml, same, weights
from phase_fakes import FakeGroup, FakeHost, facts_of, make_prompts

from hotseat.config import loads
from hotseat.errors import RunError, WorkerError
from hotseat.loop.rl.groups import RolloutHosts, ShareOfRank
from hotseat.loop.rl.launch import check_spool
from hotseat.loop.rl.role_records import host_places
from hotseat.loop.workers.experience import Share, groups_of
from hotseat.loop.workers.group_facts import Fetched, Job
from hotseat.loop.workers.rollout_host import RolloutHost
from hotseat.planning.config_plan import make_plan
from hotseat.types import PromptGroup, SampleKey, Sampling

SAMPLING = Sampling(4)


class Host(FakeHost):
    """Finishes on `fetch` what was begun, and remembers how it was called."""

    def __init__(self, rank: int):
        super().__init__(lambda key: [1.0, 0.0], is_scored=True, is_evaluation_scored=True)
        self.begun: list[Job] = []
        self.names: list[str] = []
        self.positions: list[int] = []

    def connect(self, client, engines, num_hosts=1, rank=0):
        assert num_hosts == 3
        self.rank = rank
        self.names.append(client)

    def begin(self, jobs, sampling):
        self.begun += jobs
        return [job.key for job in jobs]

    def fetch(self, wait_s, at_least, *, reports_deaths):
        self.at_least = at_least
        begun, self.begun = self.begun, []
        return Fetched([facts_of(job.key, [1.0]) for job in begun], num_unscored=0, num_sent_again=0)

    def shares(self, wanted):
        self.positions = [list(positions) for _, _, positions in wanted]
        return super().shares(wanted)


@pytest.fixture
def log():
    return []


@pytest.fixture
def group(log):
    return FakeGroup("agents", Host, 3, log)


@pytest.fixture
def hosts(group):
    return RolloutHosts(group)


def jobs_of(*prompts):
    return [Job(prompt, 0, 2) for prompt in make_prompts(10) if prompt.index in prompts]


def test_answers_are_in_the_order_of_the_jobs(hosts, group):
    facts = hosts.collect(jobs_of(*range(7)), SAMPLING)
    assert [each.prompt for each in facts] == list(range(7))
    assert [sorted(prompt for _, prompt in host.held) for host in group.workers] == [[0, 3, 6], [1, 4], [2, 5]]


def test_a_group_stays_with_its_host_and_the_next_goes_to_the_one_with_the_fewest(hosts, group):
    hosts.collect(jobs_of(0, 1, 2, 3), SAMPLING)
    hosts.forget([(0, 1), (0, 2)])
    hosts.collect(jobs_of(3, 4, 5, 6), SAMPLING)
    assert [sorted(prompt for _, prompt in host.held) for host in group.workers] == [[0, 3], [4, 6], [5]]


def test_shares_are_put_together_in_order(hosts, group):
    hosts.collect(jobs_of(*range(5)), SAMPLING)
    several = ShareOfRank([(0, 4), (0, 0), (0, 2)], [[0], [0], [1]])
    of_one_host = ShareOfRank([(0, 0), (0, 3)], [[0], [0]])
    refs, [one] = hosts.shares([several, of_one_host])
    assert [ref.get() for ref in refs] == [((0, 0),), ((0, 4),), ((0, 2),)]
    assert [host.positions for host in group.workers] == [[[1], []], [[0]], [[2]]]
    assert one.get() == ((0, 0), (0, 3))
    groups = [PromptGroup(prompt, ()) for prompt in make_prompts(3)]
    shares = [Share((groups[1], groups[2]), ((), ()), (1, 2)), Share((groups[0],), ((),), (0,))]
    assert groups_of(shares) == groups


def test_a_rank_without_groups_gets_an_empty_share(hosts):
    assert [[ref.get() for ref in refs] for refs in hosts.shares([ShareOfRank([], [])])] == [[()]]


def test_a_host_is_called_once_for_the_shares_of_all_ranks(hosts, group):
    hosts.collect(jobs_of(*range(9)), SAMPLING)
    wanted = [ShareOfRank([(0, prompt)], [[0, 0]]) for prompt in range(9)]
    assert [[ref.get() for ref in refs] for refs in hosts.shares(wanted)] == [[((0, prompt),)] for prompt in range(9)]
    assert [sorted(call.args) for call in group.named("shares")] == [[0], [1], [2]]


def test_records_are_in_the_order_of_the_samples(hosts):
    hosts.collect(jobs_of(*range(3)), SAMPLING)
    keys = [SampleKey(0, 2, 0), SampleKey(0, 0, 1), SampleKey(0, 2, 1)]
    assert [record["label"] for record in hosts.sample_records(keys)] == list(map(str, keys))
    assert hosts.sample_records([]) == []


def test_a_dead_host_is_raised_after_what_the_others_have_begun_and_finished(hosts, group):
    group.deaths = [("begin", 1)]
    begun = []
    with pytest.raises(WorkerError, match="agents rank 1 died"):
        begun.extend(hosts.begin(jobs_of(0, 1, 2), SAMPLING))
    assert begun == [([(0, 0)], [(0, 0)]), ([(0, 2)], [(0, 2)])]
    fetched = []
    with pytest.raises(WorkerError, match="agents rank 1 died"):
        fetched.extend(hosts.fetch(5.0, 1, reports_deaths=True))
    assert [facts.key for each in fetched for facts in each.facts] == [(0, 0), (0, 2)]


def test_each_host_is_waited_for_its_part_of_the_groups(hosts, group):
    list(hosts.fetch(5.0, 7, reports_deaths=True))
    assert [host.at_least for host in group.workers] == [3, 3, 3]


def test_a_replaced_host_alone_is_connected_anew_under_another_name(hosts, group):
    before = hosts.connect("engines")
    after = hosts.connect("engines", [1])
    assert len(set(before)) == 3
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] not in before
    assert [len(host.names) for host in group.workers] == [1, 2, 1]
    assert [host.rank for host in group.workers] == [0, 1, 2]


def test_by_default_each_node_with_engines_has_a_host():
    cluster = "{inventory: 2x2, component_placement: {actor: 0, rollout: 1-3}}"
    config = loads(f"cluster: {cluster}\nrollout: {{num_engines: 3}}\nactor: {{model: m}}")
    plan = make_plan(config)
    assert [(place.rank, place.node) for place in host_places(config, plan)] == [(0, 0), (1, 1)]
    more = loads(f"cluster: {cluster}\nrollout: {{num_engines: 3, num_hosts: 3}}\nactor: {{model: m}}")
    assert [(place.rank, place.node) for place in host_places(more, plan)] == [(0, 0), (1, 1), (2, 0)]


def test_a_node_without_the_folder_of_finished_groups_is_refused(tmp_path, log):
    class Elsewhere:
        def __init__(self, rank):
            self.rank = rank

        def sees(self, path):
            return self.rank == 0

    with pytest.raises(RunError, match=r"rollout host 1, on another node, does not see .* set rollout.num_hosts to 1"):
        check_spool(FakeGroup("agents", Elsewhere, 2, log), tmp_path / "spool")
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.slow
def test_weights_do_not_depend_on_the_number_of_hosts(task):
    from hotseat.loop.run import start

    def run(name, *overrides):
        start(loads(rl_yaml(task, name=name), overrides))
        return weights(task, name)

    assert same(run("one"), run("three", "rollout.num_hosts=3"))


@pytest.mark.parametrize(("size", "observed"), [(3, [0, 1, 2]), (100, [99])])
def test_of_a_call_to_many_ranks_the_one_that_answers_last_is_observed(log, size, observed):
    group, calls = FakeGroup("agents", Host, size, log), []
    group.on_call = lambda name, rank, method, started_s, ended_s: calls.append((name, rank, method))
    group.call(RolloutHost.forget, [])
    assert calls == [("agents", rank, "forget") for rank in observed]
