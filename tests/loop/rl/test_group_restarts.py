"""Which groups are restarted after an error, how often, and what happens when they do not start."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from hotseat.deaths import comes_again
from hotseat.errors import BudgetError, ClusterError, DeadlineError, RunError, WorkerError
from hotseat.loop.rl import group_restarts
from hotseat.loop.rl.group_restarts import GroupRestarts
from hotseat.loop.state.checkpoints import Checkpoint


class Model:
    """A group of two ranks. failures: what its next starts raise."""

    def __init__(self, name: str, log: list[str]):
        self.name, self.log, self.size, self.ranks = name, log, 2, range(2)
        self.is_alive = [True, True]
        self.failures: list[Exception] = []

    def alive(self):
        return list(self.is_alive)

    def restart_all(self):
        self.log.append(f"restart {self.name}")
        if self.failures:
            raise self.failures.pop(0)
        self.is_alive = [True, True]


class Case:
    def __init__(self, most: int = 3, makes_way: bool = False):
        self.log: list[str] = []
        self.actor, self.critic = Model("actor", self.log), Model("critic", self.log)
        self.saved: int | None = 4
        self.is_stopping = False
        self.restarts = GroupRestarts(
            {"actor": self.actor, "critic": self.critic},
            SimpleNamespace(
                make_way=lambda role, rank: self.log.append(f"make way {role} {rank}"),
                replaced=lambda role, rank: self.log.append(f"replaced {role} {rank}"),
            ),
            most,
            makes_way,
            end_open_work=lambda: self.log.append("end open work"),
            settle=lambda roles: self.log.append(f"settle {roles}"),
            proving=nullcontext,
        )

    def go_back(self):
        return None if self.saved is None else Checkpoint("path", self.saved, {})

    def recover(self, error):
        journal = SimpleNamespace(
            phase=lambda name: None,
            say=lambda text, kind="note": self.log.append(kind),
            go_back=lambda step: self.log.append(f"go back {step}"),
        )
        return self.restarts.recover(error, self, journal)


def died(group: str, cause: BaseException | None = None) -> WorkerError:
    error = WorkerError(f"{group} rank 1: its process died during 'update'")
    error.group, error.is_death, error.__cause__ = group, True, cause
    return error


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(group_restarts, "DYING_S", 0.0)


def test_what_died_is_restarted_after_what_lives_is_quiet_and_the_run_goes_back():
    case = Case(makes_way=True)
    assert case.recover(died("actor")).step == 4
    assert case.log == [
        "settle ['critic']",
        "restart",
        "end open work",
        "make way actor 0",
        "make way actor 1",
        "restart actor",
        "replaced actor 0",
        "replaced actor 1",
        "go back 4",
        "note",
    ]
    assert case.restarts.num_restarts == 1


def test_who_is_gone_counts_more_than_who_complains():
    case = Case()
    case.critic.is_alive[0] = False
    complaint = WorkerError("actor rank 0: 'prepare' raised WorkerError: a kept result is lost: OwnerDiedError: x")
    complaint.group = "actor"
    case.recover(complaint)
    assert [entry for entry in case.log if entry.startswith("restart ")] == ["restart critic"]


def test_a_group_that_was_waited_for_in_vain_is_restarted():
    case = Case()
    late = DeadlineError("critic: no answer to 'update' in 8.0 s")
    late.awaited = ("critic rank 0", "critic rank 1")
    case.recover(late)
    assert "restart critic" in case.log


@pytest.mark.parametrize(
    "error",
    [
        ClusterError("Ray ended"),
        RunError("a mistake"),
        died("rollout"),
        died("actor", BudgetError("does not fit", "train", 512)),  # the run resumes with the smaller budget
    ],
)
def test_other_errors_end_the_run(error):
    case = Case()
    with pytest.raises(type(error)) as raised:
        case.recover(error)
    assert raised.value is error
    assert not [entry for entry in case.log if entry.startswith("restart")]


@pytest.mark.parametrize("change", [{"saved": None}, {"is_stopping": True}])
def test_without_a_checkpoint_and_in_a_run_that_is_to_stop_nothing_is_restarted(change):
    case = Case()
    vars(case).update(change)
    with pytest.raises(WorkerError, match="its process died"):
        case.recover(died("actor"))
    assert "restart actor" not in case.log


def test_restarts_are_counted_from_the_last_new_checkpoint():
    case = Case(most=2)
    for _ in range(2):
        case.recover(died("actor"))
    case.saved = 5
    for _ in range(2):
        case.recover(died("critic"))
    with pytest.raises(WorkerError):
        case.recover(died("actor"))
    assert case.restarts.num_restarts == 4
    with pytest.raises(WorkerError):
        Case(most=0).recover(died("actor"))


def test_a_rank_that_dies_while_it_starts_is_started_once_more():
    case = Case()
    case.actor.failures = [died("actor")]
    case.recover(died("actor"))
    assert case.log.count("restart actor") == 2
    assert case.log.count("restart") == 2


def test_a_group_that_cannot_start_leaves_it_to_another_driver():
    case = Case()
    case.actor.failures = [WorkerError("actor rank 0: '__init__' raised OSError: no such device")]
    with pytest.raises(RunError, match="actor could not be started again: actor rank 0: '__init__' raised") as raised:
        case.recover(died("actor"))
    assert not comes_again(raised.value)
