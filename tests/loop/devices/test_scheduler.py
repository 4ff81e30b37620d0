"""Leases on devices: which parts are offloaded and onloaded, and who holds the lease."""

import time
from contextlib import nullcontext

import pytest

from hotseat.cluster.lease import DeviceMemory, Holder
from hotseat.config import loads
from hotseat.errors import DeadlineError, PlacementError, RunError
from hotseat.loop.devices.held_memory import DeviceWatch
from hotseat.loop.devices.scheduler import DeviceScheduler
from hotseat.planning.config_plan import make_plan
from hotseat.types import Moved


class FakeProcess:
    """One rank of a `FakeGroup`, of which methods are called by their names."""

    def __init__(self, group: "FakeGroup", rank: int):
        self.group, self.rank = group, rank

    def within(self, timeout_s):
        return self

    def call(self, method, *args):
        return [self.group.answer(self.rank, method.__name__, *args)]

    def start(self, method, *args):
        return FakePending(self, method, args)


class FakePending:
    """A call that was started, and is answered when its result is asked for."""

    def __init__(self, process: FakeProcess, method, args):
        self.process, self.method, self.args = process, method, args
        process.group.begin(process.rank, method.__name__)

    def result(self):
        return self.process.call(self.method, *self.args)


class FakeGroup:
    """Records what it is asked; every part has 100 bytes."""

    def __init__(self, name: str, size: int):
        self.name, self.size = name, size
        self.calls: list[tuple] = []
        self.started: list[tuple[str, int]] = []

    def holders(self):
        return tuple(Holder(self.name, rank, pid=100 + rank) for rank in range(self.size))

    def on(self, rank):
        return FakeProcess(self, rank)

    def begin(self, rank, method):
        self.started.append((method, rank))

    def answer(self, rank, method, *args):
        self.calls.append((method, *args, (rank,)))
        if method == "release_cache":
            return None
        return Moved(100 * len(args[0]), 100, 1.0)

    def taken(self):
        calls, self.calls = self.calls, []
        return calls


COLOCATED = """
cluster: {component_placement: {actor: 0, rollout: "@actor"}}
actor: {enable_offload: true}
rollout: {enable_offload: true}
"""


def make_scheduler(text: str, inventory: str, **options):
    plan = make_plan(loads(text), inventory)
    groups = {role.name: FakeGroup(role.name, len(role.processes)) for role in plan.roles}
    return DeviceScheduler(plan, groups, timeout_s=5.0, **options), groups


def test_roles_that_always_leave_take_turns():
    scheduler, groups = make_scheduler(COLOCATED, "1x1")
    with scheduler.lease("rollout", "rollout"):
        pass
    # Everything starts on the device; the actor makes room for the rollout.
    assert groups["actor"].taken() == [("offload", ["weights", "gradients", "optimizer"], True, (0,))]
    assert groups["rollout"].taken() == []
    with scheduler.lease("update", "actor"):
        pass
    # The engine's weights come back by the next push: no copy is kept.
    assert groups["rollout"].taken() == [("offload", ["weights", "kv_cache"], False, (0,))]
    [(method, parts, ranks)] = groups["actor"].taken()
    assert (method, sorted(parts), ranks) == ("onload", ["gradients", "optimizer", "weights"], (0,))
    with scheduler.lease("sync", "actor"):
        pass
    assert groups["rollout"].taken() == [("onload", ["weights"], (0,))]
    assert sorted(groups["actor"].taken()[0][1]) == ["gradients", "optimizer"]
    with scheduler.lease("rollout", "rollout"):
        pass
    assert groups["actor"].taken() == [("offload", ["weights"], True, (0,))]
    assert groups["rollout"].taken() == [("onload", ["kv_cache"], (0,))]
    scheduler.close()


def test_where_all_fits_nothing_moves():
    scheduler, groups = make_scheduler("cluster: {component_placement: {actor: 0, rollout: '@actor'}}", "1x1")
    for phase, role in [("rollout", "rollout"), ("prepare", "actor"), ("update", "actor"), ("sync", "actor")] * 2:
        with scheduler.lease(phase, role):
            pass
    assert groups["actor"].calls == groups["rollout"].calls == []
    assert scheduler.spent() == {}


def test_only_the_ranks_that_share_a_device_move():
    text = """
cluster: {component_placement: {actor: 0-1, rollout: 1}}
rollout: {enable_offload: true}
actor: {enable_offload: true}
"""
    scheduler, groups = make_scheduler(text, "1x2")
    with scheduler.lease("rollout", "rollout"):
        pass
    assert [call[-1] for call in groups["actor"].taken()] == [(0,), (1,)]
    with scheduler.lease("update", "actor"):
        pass
    assert [call[-1] for call in groups["rollout"].taken()] == [(0,)]


def test_all_processes_of_a_hand_over_move_at_once():
    """Each is started before the first has answered."""
    text = """
cluster: {component_placement: {actor: 0-3, rollout: "@actor"}}
actor: {enable_offload: true}
rollout: {enable_offload: true}
"""

    class Watching(FakeGroup):
        def answer(self, rank, method, *args):
            assert {(method, other) for other in range(self.size)} <= set(self.started)
            return super().answer(rank, method, *args)

    scheduler, groups = make_scheduler(text, "1x4")
    for name, group in list(groups.items()):
        groups[name] = Watching(name, group.size)
    for phase, role in [("rollout", "rollout"), ("update", "actor"), ("sync", "actor"), ("rollout", "rollout")]:
        with scheduler.lease(phase, role):
            pass
        groups["actor"].started.clear()
        groups["rollout"].started.clear()
    assert len(groups["actor"].calls) == 4 * 4  # leaves, comes, gradients and optimizer leave, weights leave


SMALL = """
cluster: {component_placement: {actor: 0, rollout: "@actor"}}
actor: {enable_offload: true, shape: {hidden_size: 1536, num_hidden_layers: 28, num_attention_heads: 12,
  num_key_value_heads: 2, intermediate_size: 8960, vocab_size: 151936, tie_word_embeddings: true, model_type: qwen2}}
rollout: {engine: vllm, memory_share: 0.4, enable_offload: true}
"""


class Ordered(FakeGroup):
    """Records the order of moves, among other groups: those that were begun before one had ended are in one list."""

    order: list[list[str]]
    open: list[str]  # moves that have not ended

    def begin(self, rank, method):
        if not self.open:
            self.order.append([])
        self.order[-1].append(f"{self.name} {method}")
        self.open.append(method)

    def answer(self, rank, method, *args):
        if method != "release_cache":
            self.open.remove(method)
        return super().answer(rank, method, *args)


def order_of_moves(text: str, used_gib: float, *phases: tuple[str, str]) -> list[list[str]]:
    """Return the order of moves in the last of these phases, with so much in use on an H200."""
    memory = DeviceMemory(int(used_gib * 2**30), 139 << 30)
    scheduler, groups = make_scheduler(text, "1x1xH200", measure=lambda device: memory)
    order: list[list[str]] = []
    begun: list[str] = []
    for name, group in list(groups.items()):
        groups[name] = Ordered(name, group.size)
        groups[name].order, groups[name].open = order, begun
    for phase, role in phases:
        order.clear()
        with scheduler.lease(phase, role):
            pass
    return [list(dict.fromkeys(names)) for names in order]


def test_parts_come_while_others_leave_where_there_is_room_for_both() -> None:
    phases = ("rollout", "rollout"), ("update", "actor")
    assert order_of_moves(SMALL, 60, *phases) == [["actor onload", "rollout offload"]]
    assert order_of_moves(SMALL, 125, *phases) == [["rollout offload"], ["actor onload"]]


def test_a_component_does_not_come_while_others_leave() -> None:
    """What it takes is known only to its author, and must not count as memory that others did not free."""
    text = SMALL.replace('rollout: "@actor"', 'rollout: "@actor", checker: "@actor"') + (
        "components: {checker: {path: 'checker.py:Checker', memory_gib: 4, enable_offload: true}}\n"
    )
    phases = ("rollout", "rollout"), ("prepare", "checker")
    assert order_of_moves(text, 60, *phases)[-1] == ["checker onload"]


def test_the_room_that_engines_of_one_device_need_is_counted_once() -> None:
    """Weights of two engines, 2 x 2.9 GiB in bf16, have room in 10 GiB; those of four would have none."""
    text = SMALL.replace('rollout: "@actor"', 'rollout: "0:0-1"').replace(
        "memory_share: 0.4", "memory_share: 0.2, num_engines: 2"
    )
    phases = ("rollout", "rollout"), ("update", "actor"), ("sync", "actor")
    assert order_of_moves(text, 129, *phases) == [["rollout onload", "actor offload"]]
    assert order_of_moves(text, 131, *phases) == [["actor offload"], ["rollout onload"]]


def test_a_holder_that_dies_while_parts_come_early_does_not_stop_the_next_phase() -> None:
    """What came early is in use beside what was in use when the dead holder got the device."""
    gone: set[int] = set()
    used = [40 << 30]

    class Coming(FakeGroup):
        def answer(self, rank, method, *args):
            if method == "onload":
                gone.add(100)  # the engine, whose weights and cache are gone with it
                used[0] += 5 << 30
                return Moved(5 << 30, 5 << 30, 1.0)
            return super().answer(rank, method, *args)

    class Dead(FakeGroup):
        def answer(self, rank, method, *args):
            if 100 in gone:
                raise RunError("gone")
            return super().answer(rank, method, *args)

    scheduler, groups = make_scheduler(
        SMALL,
        "1x1xH200",
        measure=lambda device: DeviceMemory(used[0], 139 << 30),
        is_gone=lambda holder: holder.group == "rollout" and holder.pid in gone,
    )
    groups |= {"actor": Coming("actor", 1), "rollout": Dead("rollout", 1)}
    with scheduler.lease("rollout", "rollout"):
        pass
    groups["actor"].taken()
    with scheduler.lease("update", "actor"):  # granted once the dead engine's process is gone
        assert groups["actor"].taken() == []  # it came while the engine was to leave, and is asked for nothing more


@pytest.mark.parametrize("failing", ["actor", "rollout"])
def test_what_came_or_left_is_kept_where_the_other_failed(failing: str) -> None:
    """The actor comes while the engine leaves. When the phase is tried again, only what failed moves."""

    class Failing(FakeGroup):
        def answer(self, rank, method, *args):
            raise RunError(f"{self.name} has no memory")

    memory = DeviceMemory(60 << 30, 139 << 30)
    scheduler, groups = make_scheduler(SMALL, "1x1xH200", measure=lambda device: memory)
    with scheduler.lease("rollout", "rollout"):
        pass
    groups["actor"].taken()
    working = groups[failing]
    groups[failing] = Failing(failing, 1)
    with pytest.raises(RunError, match="has no memory"), scheduler.lease("update", "actor"):
        pass
    groups[failing] = working
    with scheduler.lease("update", "actor"):
        pass
    moves = [(name, call[0]) for name in groups for call in groups[name].calls if call[0] != "release_cache"]
    assert moves == [("actor", "onload"), ("rollout", "offload")]
    assert not scheduler.has_weights("rollout")


def test_a_process_whose_parts_leave_and_come_in_one_hand_over_is_asked_for_both() -> None:
    """A flow of one's own may need other parts of a role in each phase."""
    text = SMALL + (
        "flow: [{name: rollout, run: [rollout]}, {name: prepare, run: {actor: [optimizer]}},"
        " {name: update, train: [actor]}, {name: sync, push: [rollout]}]\n"
    )
    phases = ("rollout", "rollout"), ("prepare", "actor"), ("sync", "actor")
    assert order_of_moves(text, 60, *phases) == [["actor onload", "rollout onload", "actor offload"]]
    assert order_of_moves(text, 137, *phases) == [["actor offload"], ["actor onload", "rollout onload"]]


def test_a_gone_process_is_not_held_to_what_it_would_have_freed() -> None:
    """Memory may even grow meanwhile, by another process."""
    used = [10 << 30]

    class Gone(FakeGroup):
        def answer(self, rank, method, *args):
            used[0] += 1
            raise RunError("gone")

    scheduler, groups = make_scheduler(
        COLOCATED,
        "1x1",
        measure=lambda device: DeviceMemory(used[0]),
        is_gone=lambda holder: holder.group == "rollout",
    )
    groups["rollout"] = Gone("rollout", 1)
    with scheduler.lease("update", "actor"):
        pass
    assert used[0] > 10 << 30
    assert scheduler.spent() == {}  # nobody is left to have moved anything


def test_what_others_moved_is_kept_where_one_process_fails() -> None:
    """The engine that lives has dropped its weights and cache, and is asked to onload them when it is leased again."""
    text = """
cluster: {component_placement: {actor: 0-1, rollout: "@actor"}}
actor: {enable_offload: true}
rollout: {enable_offload: true}
"""

    class Failing(FakeGroup):
        def answer(self, rank, method, *args):
            if rank == 1 and not self.has_failed:
                self.has_failed = True
                raise RunError("rank 1 is dying")
            return super().answer(rank, method, *args)

        has_failed = False

    scheduler, groups = make_scheduler(text, "1x2")
    with scheduler.lease("rollout", "rollout"):
        pass
    groups["rollout"] = Failing("rollout", 2)
    with pytest.raises(RunError, match="rank 1 is dying"), scheduler.lease("update", "actor"):
        pass
    assert groups["rollout"].taken() == [("offload", ["weights", "kv_cache"], False, (0,))]
    assert not scheduler.has_weights("rollout")
    scheduler.replaced("rollout", 1)
    with scheduler.lease("sync", "actor"):
        pass
    assert ("onload", ["weights"], (0,)) in groups["rollout"].taken()


@pytest.mark.slow
def test_what_a_holder_onloads_itself_must_be_free_after_its_death() -> None:
    used, gone = [10 << 30], set()

    class Coming(FakeGroup):
        def answer(self, rank, method, *args):
            moved = 30 << 30 if method == "onload" else 0
            used[0] += moved
            return Moved(moved, moved, 1.0)

    scheduler, groups = make_scheduler(
        COLOCATED,
        "1x1",
        measure=lambda device: DeviceMemory(used[0]),
        is_gone=lambda holder: holder.group in gone,
    )
    groups["rollout"] = Coming("rollout", 1)
    groups["actor"] = Coming("actor", 1)
    scheduler._timeout_s = 0.2
    for phase, role in (("rollout", "rollout"), ("update", "actor"), ("sync", "actor"), ("rollout", "rollout")):
        with scheduler.lease(phase, role):
            pass
    gone.add("rollout")  # and its memory is still in use
    with pytest.raises(DeadlineError, match="bytes are in use"), scheduler.lease("update", "actor"):
        pass


def test_a_phase_that_the_flow_does_not_have_is_named():
    scheduler, _ = make_scheduler(COLOCATED, "1x1")
    found = "no phase 'prepare' in which reference works; it has rollout: rollout"
    with pytest.raises(PlacementError, match=found), scheduler.lease("prepare", "reference"):
        pass


@pytest.mark.slow
def test_a_device_that_is_not_given_back_is_waited_for_and_the_holder_named():
    scheduler, _ = make_scheduler(COLOCATED, "1x1")
    scheduler._timeout_s = 0.2
    with scheduler.lease("rollout", "rollout"):
        pass
    scheduler._lease = None  # the holder never reports
    found = r"phase 'update' waited .* rollout\[0\]"
    with pytest.raises(DeadlineError, match=found), scheduler.lease("update", "actor"):
        pass


def test_a_device_watch_keeps_the_most_that_was_in_use() -> None:
    used = iter([5 << 30, 9 << 30, 7 << 30])
    last = [0]

    def measure(device: int) -> DeviceMemory | None:
        if device == 1:
            return None
        last[0] = next(used, last[0])
        return DeviceMemory(last[0])

    watch = DeviceWatch([0, 1], measure)  # the first look says which devices can be measured
    while last[0] != 7 << 30:
        time.sleep(0.005)
    assert watch.peaks_gib() == {0: 9.0}
    assert watch.peaks_gib() == {0: 7.0}
    watch.close()


def test_memory_that_did_not_leave_names_its_holder() -> None:
    """The actor says that it gave up 3 x 100 bytes; an allowance of half a GiB covers that, but not 3 GiB."""

    class Liar(FakeGroup):
        def answer(self, rank, method, *args):
            return Moved(3 << 30, 0, 1.0)

    scheduler, groups = make_scheduler(COLOCATED, "1x1", measure=lambda device: DeviceMemory(10 << 30))
    with scheduler.lease("rollout", "rollout"):
        pass
    groups["rollout"] = scheduler._groups["rollout"] = Liar("rollout", 1)
    with (
        pytest.raises(
            RunError,
            match=r"rollout rank 0 offloaded its weights and kv_cache on device 0, by its own account 3.00 GiB,"
            r" but the memory in use there fell by 0.00 GiB",
        ),
        scheduler.lease("update", "actor"),
    ):
        pass


@pytest.mark.parametrize("held_gib", [0, 3])
def test_memory_that_came_meanwhile_is_not_held_against_who_left(held_gib: int) -> None:
    """The actor brings 9 GiB while the engine frees 50, or 3 GiB less than it says."""
    used = [70 << 30]

    class Moving(FakeGroup):
        def answer(self, rank, method, *args):
            size = (9 if self.name == "actor" else 50) << 30
            used[0] += size if method == "onload" else (held_gib << 30) - size
            return Moved(size, 0, 1.0)

    scheduler, groups = make_scheduler(SMALL, "1x1xH200", measure=lambda device: DeviceMemory(used[0], 139 << 30))
    with scheduler.lease("rollout", "rollout"):
        pass
    groups |= {name: Moving(name, 1) for name in ("actor", "rollout")}
    if held_gib:
        expected = pytest.raises(
            RunError,
            match=r"rollout rank 0 .* account 50.00 GiB, but the memory in use there fell by 38.00 GiB while 9.00 GiB"
            r" were onloaded: it still holds the rest \(1.00 GiB are allowed\)",
        )
    else:
        expected = nullcontext()
    with expected, scheduler.lease("update", "actor"):
        pass


def test_seconds_and_bytes_of_hand_overs_are_counted_since_last_asked() -> None:
    scheduler, _ = make_scheduler(COLOCATED, "1x1")
    with scheduler.lease("rollout", "rollout"):
        pass
    with scheduler.lease("update", "actor"):
        pass
    spent = scheduler.spent()
    assert spent["handover/gib"] == pytest.approx(
        (300 + 200 + 300) / 2**30
    )  # the actor leaves, the engine leaves, the actor comes
    assert spent["time/offload"] >= 0
    assert scheduler.spent() == {}


def test_idle_roles_give_back_what_they_cached_where_memory_is_short() -> None:
    text = """
cluster: {component_placement: {actor: 0, rollout: "@actor"}}
actor: {shape: {hidden_size: 1536, num_hidden_layers: 28, num_attention_heads: 12, num_key_value_heads: 2,
  intermediate_size: 8960, vocab_size: 151936, tie_word_embeddings: true, model_type: qwen2}}
rollout: {engine: vllm, memory_share: 0.4}
"""
    for used_gib, calls in ((60, []), (138, [("release_cache", (0,))])):
        memory = DeviceMemory(used_gib << 30, 139 << 30)
        scheduler, groups = make_scheduler(text, "1x1xH200", measure=lambda device, memory=memory: memory)
        with scheduler.lease("rollout", "rollout"):
            pass
        assert groups["actor"].calls == calls


def test_a_process_that_replaces_a_dead_one_may_hold_more_than_there_was() -> None:
    """Its lease was granted when its weights were away; the new process has them."""
    used = [10 << 30]
    gone: set[int] = set()
    scheduler, groups = make_scheduler(
        COLOCATED,
        "1x1",
        measure=lambda device: DeviceMemory(used[0]),
        is_gone=lambda holder: holder.pid in gone,
    )
    with scheduler.lease("rollout", "rollout"):
        pass
    groups["actor"].taken()
    gone.add(100)
    used[0] = 13 << 30
    scheduler.replaced("rollout", 0)
    with scheduler.lease("update", "actor"):  # granted once the dead engine's process is gone
        [(method, parts, _)] = groups["actor"].taken()
        assert (method, sorted(parts)) == ("onload", ["gradients", "optimizer", "weights"])


def test_a_process_without_devices_can_be_replaced_too() -> None:
    scheduler, groups = make_scheduler("cluster: {component_placement: {actor: 0, rollout: cpu*1}}", "1x1")
    scheduler.make_way("rollout", 0)
    scheduler.replaced("rollout", 0)
    assert groups["actor"].calls == []


def test_others_make_way_for_an_engine_that_starts_anew() -> None:
    scheduler, groups = make_scheduler(COLOCATED, "1x1")
    with scheduler.lease("sync", "actor"):
        pass
    groups["actor"].taken()
    scheduler.make_way("rollout", 0)
    assert groups["actor"].taken() == [("offload", ["weights"], True, (0,))]  # the rest had left before
    scheduler.replaced("rollout", 0)
    with scheduler.lease("sync", "actor"):
        pass
    assert ("onload", ["weights"], (0,)) in groups["actor"].taken()


def test_what_simulators_took_is_measured_alone_where_others_make_way_too() -> None:
    text = """
cluster: {component_placement: {actor: 0, env: "@actor", rollout: "@actor"}}
env: {path: gym, tasks: [CartPole-v1], enable_offload: true}
actor: {enable_offload: true}
"""
    used = [20 << 30]
    measured = []

    class Leaving(FakeGroup):
        def answer(self, rank, method, *args):
            size = (3 if self.name == "env" else 9) << 30
            used[0] -= size
            return Moved(0 if self.name == "env" else size, 0, 1.0)

    scheduler, groups = make_scheduler(
        text,
        "1x1xA100-80G",
        measure=lambda device: DeviceMemory(used[0]),
        when_measured=lambda device, num_bytes: measured.append((device, num_bytes)),
    )
    groups |= {name: Leaving(name, 1) for name in ("actor", "env")}
    scheduler.make_way("rollout", 0)
    assert measured == [(0, 3 << 30)]


def test_what_simulators_took_is_measured_as_they_leave_and_counted_by_later_plans(tmp_path, monkeypatch) -> None:
    from hotseat.planning.simulator_memory import keep_gib, kept_gib

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = """
cluster: {component_placement: {actor: 0-1, env: 0, rollout: 1}}
env: {path: gym, tasks: [CartPole-v1], enable_offload: true}
"""
    used = {0: 9 << 30, 1: 5 << 30}
    measured = []
    scheduler, groups = make_scheduler(
        text,
        "1x2xA100-80G",
        measure=lambda device: DeviceMemory(used[device]),
        when_measured=lambda device, num_bytes: measured.append((device, num_bytes)),
    )

    def leave(rank, method, *args):
        if method == "offload":
            used[0] -= 3 << 30
        return Moved(0, 0, 1.0)

    groups["env"].answer = leave
    with scheduler.lease("rollout", "env"):
        pass
    with scheduler.lease("update", "actor"):
        pass
    assert measured == [(0, 3 << 30)]
    assert scheduler.spent()["handover/gib"] == 3.0

    config = loads(text)
    assert kept_gib(config) is None
    assert keep_gib(config, 3.0)
    assert not keep_gib(config, 2.5)  # the largest stays
    assert kept_gib(loads(text, ["env.num_envs=32"])) is None  # so many take another amount
    [term] = [
        term
        for group in make_plan(config, "1x2xA100-80G").groups
        for step in group.steps
        if step.step == "rollout"
        for term in step.terms
        if term.role == "env" and term.name == "simulator"
    ]
    assert (term.gib, term.formula) == (3.0, "measured by an earlier run")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not keep_gib(config, 3.0)  # there is no directory to keep it in


class FakeTimeline:
    """Counts spans by their lanes."""

    def __init__(self):
        self.lanes: list[str] = []

    def span(self, process, thread, name, start_s, end_s, **facts):
        self.lanes.append(thread)


@pytest.mark.parametrize(
    ("num_nodes", "lanes"),
    [(1, [f"device {device}" for device in range(4)]), (256, ["devices 0-1023"])],
)
def test_thousands_of_devices_are_drawn_by_range(num_nodes, lanes):
    half = 4 * num_nodes
    text = f"cluster: {{component_placement: {{actor: 0-{half - 1}, rollout: {half}-{2 * half - 1}}}}}"
    timeline = FakeTimeline()
    scheduler, _ = make_scheduler(text, f"{num_nodes}x8", timeline=timeline)
    with scheduler.lease("update", "actor"):
        pass
    scheduler.close()
    assert timeline.lanes == lanes
