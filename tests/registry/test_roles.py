"""Roles as records: one more record is one more role that is launched, watched and replaced."""

from pathlib import Path
from typing import ClassVar

import pytest
from dying_engines import SHARED, Engines
from loop_cases import rl_yaml

from hotseat.cluster import Process, local
from hotseat.config import loads, roles_of
from hotseat.loop.rl import role_records
from hotseat.loop.rl.role_records import RoleRecord
from hotseat.loop.run import start
from hotseat.observe import read_lines
from hotseat.registry.roles import COMPONENT, ROLES, role_entry

ROOT = Path(__file__).parents[2]


class Observer:
    """Counts how often it is made."""

    made: ClassVar[list[str]] = []

    def __init__(self, model: str):
        self.made.append(model)


class Observers(local.LocalGroup):
    """A group whose process dies as soon as it is made, and not again."""

    is_dead = True

    def alive(self) -> list[bool]:
        return [not self.is_dead]

    def restart(self, rank, *, timeout_s=None):
        super().restart(rank)
        self.is_dead = False


@pytest.mark.slow
def test_a_role_is_launched_watched_and_replaced_by_its_record_alone(task, monkeypatch, capsys):
    connected, made = [], {}
    observer = RoleRecord(
        "observer",
        lambda launch: (Observer, (launch.config.actor.model,)),
        is_present=lambda config: config.task == "rl",
        processes=lambda launch: [Process(0, 0)],
        replaced_as="observer",
        connect=lambda groups, ranks: connected.append(ranks),
    )
    monkeypatch.setattr(role_records, "RECORDS", (*role_records.RECORDS, observer))
    monkeypatch.setattr(Observer, "made", [])
    plain = local.LocalGroup

    def group(launch, rank_env):
        of_role = {"observer": Observers, "rollout": lambda *args: Engines(*args, fatal=1)}
        made[launch.name] = of_role.get(launch.name, plain)(launch, rank_env)
        return made[launch.name]

    monkeypatch.setattr("hotseat.cluster.local.LocalGroup", group)
    start(loads(rl_yaml(task, name="run", cluster=SHARED)))
    assert list(made) == ["rollout", "actor", "observer", "agents"]
    assert "observer ready after" in capsys.readouterr().out
    said = [event["text"] for event in read_lines(task / "runs" / "run" / "events.jsonl")]
    assert [text.partition(" died")[0] for text in said if "is replaced" in text] == ["engine 0", "observer 0"]
    assert Observer.made == [str(task / "model")] * 2
    assert connected == [[0]]
    assert made["observer"].is_closed


def test_every_role_has_a_record_and_every_record_a_role():
    records = [record.name for record in role_records.RECORDS]
    assert sorted(records) == sorted([*ROLES, "agents"])  # hosts that simulate nothing have no devices


def test_the_table_of_roles_in_the_docs_is_that_of_the_registry():
    in_turn = sorted([*ROLES.values(), COMPONENT], key=lambda role: role.turn)
    rows = [f"| {role.name} | {role.present_if} | {role.work} |" for role in in_turn]
    assert "\n".join(rows) in (ROOT / "ARCHITECTURE.md").read_text()


def test_roles_work_in_the_order_of_their_entries_and_any_other_name_is_a_component():
    config = loads(
        "algorithm: {estimator: gae, kl: {coef: 0.1}}\nreward: {model: m}\ncomponents: {filter: {path: 'a:B'}}\n"
        "cluster: {component_placement: {actor: 0, inference: 1}}"
    )
    assert roles_of(config) == ("rollout", "reward", "filter", "reference", "inference", "critic", "actor")
    assert (role_entry("filter").kind, role_entry("filter").section) == ("component", "components.filter")
