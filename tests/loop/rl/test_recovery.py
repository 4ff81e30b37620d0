"""Engines and hosts that die are replaced, up to a number of deaths."""

import pytest

from hotseat.errors import ClusterError, RunError, WorkerError
from hotseat.loop.rl.recovery import ENGINE, HOST, MAX_DEATHS, Recovery, Replaceable, start_up


class Engines:
    def __init__(self, size: int = 2, name: str = "rollout"):
        self.name = name
        self.is_alive = [True] * size
        self.log: list[str] = []

    def alive(self) -> list[bool]:
        return list(self.is_alive)

    def restart(self, rank: int) -> None:
        self.is_alive[rank] = True
        self.log.append(f"restart {rank}")

    def replaced(self, role: str, rank: int) -> None:
        self.log.append(f"replaced {role} {rank}")


def recovery_of(engines: Engines, push=None, hosts=None, rejoins_in_lease=False) -> Recovery:
    agents = Replaceable(
        hosts or Engines(size=1, name="agents"),
        HOST,
        lambda ranks: engines.log.append(f"reconnect {ranks}"),
    )
    return Recovery(
        [Replaceable(engines, ENGINE, needs_weights=True), agents],
        engines,
        push=push or (lambda ranks: engines.log.append(f"push {ranks}")),
        rejoin=lambda ranks: engines.log.append(f"rejoin {ranks}"),
        say=lambda text: None,
        rejoins_in_lease=rejoins_in_lease,
    )


def dies(engines: Engines, times: int, rank: int = 1):
    """Return work during which an engine dies `times` times."""
    left = [times]

    def work(*_):
        if left[0]:
            left[0] -= 1
            engines.is_alive[rank] = False
            raise WorkerError(f"rollout rank {rank} died")
        return "done"

    return work


def test_a_dead_engine_is_replaced_gets_the_weights_and_the_work_is_repeated():
    engines = Engines()
    assert recovery_of(engines).during(dies(engines, 1)) == "done"
    assert engines.log == ["restart 1", "replaced rollout 1", "push [1]", "rejoin [1]"]


def test_a_push_is_repeated_as_a_whole_and_the_new_engine_rejoins_after_it():
    engines = Engines()
    work = dies(engines, 1)

    def push():
        result = work()
        engines.log.append("pushed")
        return result

    assert recovery_of(engines).during(push, is_push=True) == "done"
    assert engines.log == ["restart 1", "replaced rollout 1", "pushed", "rejoin [1]"]


@pytest.mark.parametrize("is_push", [False, True])
def test_where_new_engines_wait_for_a_lease_they_rejoin_when_the_work_says_so(is_push):
    """A push leaves an engine without its KV cache, so it would refuse the requests that wait at hosts."""
    engines = Engines()
    mine = recovery_of(engines, rejoins_in_lease=True)
    assert mine.during(dies(engines, 1), is_push=is_push) == "done"
    assert not any(entry.startswith("rejoin") for entry in engines.log)
    mine.use_new_engines()
    mine.use_new_engines()
    assert [entry for entry in engines.log if entry.startswith("rejoin")] == ["rejoin [1]"]


def test_an_engine_that_dies_while_it_gets_its_weights_is_replaced_too():
    engines = Engines()
    push = dies(engines, 2, rank=0)
    assert recovery_of(engines, push).during(dies(engines, 1)) == "done"
    assert engines.log.count("restart 0") == 2
    assert engines.log[-1] == "rejoin [0, 1]"


def test_an_error_without_a_death_is_raised():
    engines = Engines()

    def work():
        raise RunError("the rewards leave nothing to learn from")

    with pytest.raises(RunError, match="nothing to learn from"):
        recovery_of(engines).during(work)
    assert engines.log == []


@pytest.mark.parametrize("is_at_restart", [False, True])
def test_without_a_cluster_nothing_is_replaced(is_at_restart):
    """The cluster's processes are dead too, but no others could be started."""
    engines = Engines()

    def fail(*_):
        engines.is_alive = [False, False]
        raise ClusterError("Ray's raylet died")

    if is_at_restart:
        engines.restart = fail
    with pytest.raises(ClusterError, match="Ray's raylet died"):
        recovery_of(engines).during(dies(engines, 1) if is_at_restart else fail)
    assert engines.log == []


def test_a_crash_loop_ends_with_the_reason():
    """Scenario 6."""
    engines = Engines()
    with pytest.raises(WorkerError, match=rf"died {MAX_DEATHS + 1} times .*the last: rollout rank 1 died"):
        recovery_of(engines).during(dies(engines, 100))
    assert engines.log.count("restart 1") == MAX_DEATHS


def test_a_host_is_replaced_too_and_engines_keep_their_weights():
    engines, hosts = Engines(), Engines(size=1, name="agents")
    mine = recovery_of(engines, hosts=hosts)
    assert mine.during(dies(hosts, 1, rank=0)) == "done"
    assert hosts.log == ["restart 0"]
    assert engines.log == ["replaced agents 0", "reconnect [0]"]
    assert (mine.restarts[ENGINE], mine.restarts[HOST]) == (0, 1)


def test_an_engine_gets_its_weights_although_a_host_dies_before_it_rejoins():
    engines, hosts = Engines(), Engines(size=1, name="agents")
    mine = recovery_of(engines, hosts=hosts)
    rejoins = iter([WorkerError("agents rank 0 died"), None])

    def rejoin(ranks):
        error = next(rejoins)
        if error is not None:
            hosts.is_alive[0] = False
            raise error

    mine.rejoin = rejoin
    assert mine.during(dies(engines, 1)) == "done"
    assert engines.log == [
        "restart 1",
        "replaced rollout 1",
        "push [1]",
        "replaced agents 0",
        "reconnect [0]",
        "push [1]",
    ]
    assert next(rejoins, "both happened") == "both happened"


def test_a_rollout_that_succeeds_resets_the_count_of_deaths():
    engines = Engines()
    mine = recovery_of(engines)
    for _ in range(3):
        mine.during(dies(engines, MAX_DEATHS - 1))
        mine.start_counting()
    assert mine.restarts[ENGINE] == 3 * (MAX_DEATHS - 1)


class Starting:
    """Group of one process whose starts raise these errors, one after another, and then succeed."""

    name = "rollout"

    def __init__(self, *errors: WorkerError):
        self.errors = list(errors)
        self.num_starts = 0

    def ready(self) -> None:
        self.num_starts += 1
        if self.errors:
            raise self.errors.pop(0)

    def restart(self, rank: int) -> None:
        self.ready()

    def alive(self) -> list[bool]:
        return [False]


def death(text: str) -> WorkerError:
    error = WorkerError(text)
    error.is_death = True
    return error


def test_a_process_that_dies_while_it_starts_is_started_again_up_to_the_limit():
    said: list[str] = []
    group = Starting(death("rollout rank 0: its process died\nlast words"))
    start_up(group, said.append)
    assert group.num_starts == 2
    assert said == ["rollout died while it started, and is started again (rollout rank 0: its process died)"]
    doomed = Starting(*(death(f"rollout rank 0: died {n}\nlast words {n}") for n in range(100)))
    with pytest.raises(WorkerError, match=rf"rollout rank 0: died {MAX_DEATHS}\nlast words"):
        start_up(doomed, said.append)


def test_a_process_that_fails_to_start_without_dying_is_not_started_again():
    group = Starting(WorkerError("rollout rank 0: '__init__' raised RunError: vLLM did not start"))
    with pytest.raises(WorkerError, match="vLLM did not start"):
        start_up(group, pytest.fail)
    assert group.num_starts == 1
