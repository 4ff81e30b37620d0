"""Calls to workers are seen by the type checker: a misspelt method, a wrong argument, a string in a method's place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hotseat.cluster import Cluster, as_arguments

ROOT = Path(__file__).parents[2]

RIGHT = """
from collections.abc import Sequence
from typing import Protocol

from hotseat.cluster import WorkerGroup, as_arguments


class Model:
    def score(self, shares: Sequence[int], temperature: float) -> dict[str, float]:
        return {}


class Actor(Model):
    def prepare(self, shares: Sequence[int], num_steps: int, *, reference: Sequence[dict[str, float]] = ()) -> None:
        pass

    def packed(self, transport: str) -> bytes:
        return b""


class Packs(Protocol):
    def packed(self, transport: str) -> bytes: ...


def push(group: WorkerGroup[Packs]) -> list[bytes]:
    return group.call(Packs.packed, "host")


def use(actor: WorkerGroup[Actor]) -> None:
    scores: list[dict[str, float]] = actor.on(0).within(60).call(Actor.score, [1], 1.0)
    kept = actor.start_scatter_and_keep(Actor.score, [[1], [2]], temperature=1.0).result()
    actor.scatter(Actor.prepare, [[1], [2]], 3, reference=as_arguments(kept))
    sizes: list[int] = [len(each) for each in actor.start(Actor.packed, "host").result()]
    push(actor)
"""

WRONG = {  # and the kind of error that mypy finds in it
    "actor.call(Actor.prepaer, [1], 2)": "attr-defined",
    'actor.call(Actor.score, [1], "warm")': "arg-type",
    "actor.call(Actor.score, [1])": "call-arg",
    'actor.call("score", [1], 1.0)': "arg-type",
    "model.call(Actor.prepare, [1], 2)": "arg-type",
    "actor.scatter(Actor.prepare, [[1], [2]], steps=3)": "call-arg",
    "names: list[str] = actor.call(Actor.score, [1], 1.0)": "arg-type",
    "push(model)": "arg-type",
}


@pytest.mark.long
@pytest.mark.slow
def test_a_type_checker_sees_what_is_wrong_with_a_call(tmp_path):
    lines = [
        *RIGHT.splitlines(),
        *(
            f"def wrong_{number}(actor: WorkerGroup[Actor], model: WorkerGroup[Model]) -> None:\n    {line}"
            for number, line in enumerate(WRONG)
        ),
    ]
    (tmp_path / "calls.py").write_text("\n".join(lines) + "\n")
    # The cache of `make lint`, where there is one, saves some ten seconds.
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(tmp_path / "calls.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=860)
    errors: dict[int, str] = {}
    for line in done.stdout.splitlines():
        where, _, message = line.partition(": error: ")
        if message:
            number = int(where.rpartition(":")[2])
            errors[number] = errors.get(number, "") + message + "\n"
    first = len(RIGHT.splitlines()) + 2  # the body of the first function that is wrong
    assert not [number for number in errors if number < first], done.stdout + done.stderr
    for number, (line, kind) in enumerate(WRONG.items()):
        assert f"[{kind}]" in errors.get(first + 2 * number, ""), f"{line}\n{done.stdout}"


class Doubling:
    def double(self, value: int) -> int:
        return 2 * value


class Tripling(Doubling):
    def double(self, value: int) -> int:
        return 3 * value


@pytest.mark.parametrize("method", ["double", lambda worker: worker.double(1), 3])
def test_what_is_no_method_is_refused(method):
    with Cluster("local") as cluster:
        group = cluster.launch("some", Doubling)
        with pytest.raises(TypeError, match=r"is not a method of a worker class; pass one, as in"):
            group.call(method, 1)


def test_the_method_of_the_class_that_runs_is_called():
    with Cluster("local") as cluster:
        assert cluster.launch("some", Tripling).call(Doubling.double, 2) == [6]


def test_values_are_scattered_and_kept_with_further_arguments():
    class Adding:
        def add(self, value: int, more: int, *, yet_more: int = 0) -> int:
            return value + more + yet_more

    with Cluster("local") as cluster:
        group = cluster.launch("adding", Adding, processes=3)
        assert group.scatter(Adding.add, [1, 2, 3], 10, yet_more=100) == [111, 112, 113]
        kept = group.on(2, 0).start_scatter_and_keep(Adding.add, [1, 2], 10).result()  # to ranks in ascending order
        assert [ref.get() for ref in kept] == [11, 12]
        assert group.on(0, 1).scatter(Adding.add, as_arguments(kept), 0) == [11, 12]
        assert group.on(1).within(60).start(Adding.add, 1, 1).result() == [2]
