"""Objects of a script become files that other processes can load; what cannot is refused by name."""

import functools
import json
import subprocess
import sys
import threading
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pandas
import pytest
from datasets import Dataset, DatasetDict

from hotseat import Agent, Environment, UserError
from hotseat.agents.agent_file import load_agent
from hotseat.data import load_rows
from hotseat.errors import ConfigError
from hotseat.script.objects import RECORD, ScriptObjects
from hotseat.user_functions import user_function

ROWS = [{"input": "1 + 1 =", "label": 2}, {"input": "2 + 2 =", "label": "four"}]


def with_keys(key: str, value: object) -> dict:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def made(tmp_path: Path, key: str, value: object):
    objects = ScriptObjects()
    values = objects.replace(with_keys(key, value))
    for part in key.split("."):
        values = values[part]
    place = objects.place(tmp_path / "runs" / "rl-1")
    return objects, place(values)


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        tuple(ROWS),
        {1: ROWS[0], 2: ROWS[1]}.values(),
        Dataset.from_list([{**row, "label": str(row["label"])} for row in ROWS]),
    ],
    ids=["list", "tuple", "an iterable with a length", "Dataset"],
)
def test_rows_are_read_as_they_are(tmp_path, rows):
    objects, path = made(tmp_path, "data.path", rows)
    with objects.written():
        read = [dict(row.values) for row in load_rows(path)]
    assert [row["input"] for row in read] == ["1 + 1 =", "2 + 2 ="]
    assert [str(row["label"]) for row in read] == ["2", "four"]
    if isinstance(rows, list):
        assert read == ROWS  # a number stays one beside a text


def test_a_data_frame_has_rows(tmp_path):
    objects, path = made(tmp_path, "eval.path", pandas.DataFrame({"input": ["a", "b"], "label": [1, 2]}))
    with objects.written():
        assert [dict(row.values) for row in load_rows(path)] == [{"input": "a", "label": 1}, {"input": "b", "label": 2}]


def test_dates_bytes_and_decimals_of_a_data_set_stay_what_they_are(tmp_path):
    row = {"at": datetime(2026, 1, 2, 3, 4, 5, 6), "price": Decimal("1.50"), "raw": b"\x00", "text": "a"}
    objects, path = made(tmp_path, "data.path", Dataset.from_list([row]))
    with objects.written():
        assert [dict(each.values) for each in load_rows(path)] == [row]


def test_files_are_there_for_this_user_alone_and_only_while_the_script_trains(tmp_path):
    objects, path = made(tmp_path, "data.path", ROWS)
    folder = Path(path).parent

    def stopped() -> None:
        assert folder.stat().st_mode & 0o77 == 0
        assert folder == tmp_path / "runs" / ".rl-1.python"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), objects.written():
        stopped()
    assert not folder.exists()


def test_a_second_script_does_not_take_the_files_of_the_first_and_remains_are_removed(tmp_path):
    objects, path = made(tmp_path, "data.path", ROWS)
    other, _ = made(tmp_path, "data.path", ROWS[:1])
    with objects.written():
        with pytest.raises(UserError, match="is in use by process"), other.written():
            pass
        assert len(load_rows(path)) == 2
    Path(path).parent.mkdir()
    (Path(path).parent / "old.pkl").write_bytes(b"")
    with objects.written():
        assert not (Path(path).parent / "old.pkl").exists()


def test_a_function_with_what_it_uses_runs_in_another_process_and_folder(tmp_path, monkeypatch):
    (tmp_path / "local_helper.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import local_helper

    bonus = 1.5

    def reward(queries, prompts, labels):
        return [local_helper.double(len(query)) + bonus for query in queries]

    objects, path = made(tmp_path, "reward.function", reward)
    file, _, name = path.rpartition(":")
    code = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])[sys.argv[2]](['abc'], [''], [''])))"
    with objects.written():
        done = subprocess.run(
            [sys.executable, "-c", code, file, name], cwd="/", capture_output=True, text=True, timeout=300
        )
    assert (name, json.loads(done.stdout)) == ("reward", [7.5]), done.stderr


def test_a_partial_a_lambda_and_two_of_one_name_have_files_of_their_own(tmp_path):
    def first(x):
        return x

    scaled = functools.partial(lambda factor, x: factor * x, 3)
    objects = ScriptObjects()
    values = objects.replace({"algorithm": {"estimator": first, "policy_loss": scaled}, "data": {"sampler": first}})
    place = objects.place(tmp_path / "runs" / "x")
    paths = [place(values["algorithm"]["estimator"]), place(values["algorithm"]["policy_loss"])]
    paths.append(place(values["data"]["sampler"]))
    assert [Path(path).name for path in paths] == ["first.py:first", "function.py:function", "first_2.py:first"]
    with objects.written():
        assert [user_function(path)(2) for path in paths] == [2, 6, 2]


def test_agents_are_classes_or_objects_and_environments_are_classes(tmp_path):
    class Adder(Environment):
        async def step(self, *arguments, **named):
            raise NotImplementedError

    class Fixed(Agent):
        def __init__(self, word):
            self.word = word

        async def run(self, *arguments, **named):
            raise NotImplementedError

    objects, path = made(tmp_path, "agent.path", Adder)
    with objects.written():
        assert type(load_agent(path, None, max_length=8)).__name__ == "MultiTurn"
    objects, path = made(tmp_path, "agent.path", Fixed("seven"))
    with objects.written():
        agent = load_agent(path, None, max_length=8)
    assert agent.word == "seven"


def test_what_cannot_be_sent_is_refused_with_the_variable_that_is_why(tmp_path):
    lock = threading.Lock()

    def reward(queries, prompts, labels):
        with lock:
            return [0.0 for _ in queries]

    objects, _ = made(tmp_path, "reward.function", reward)
    with (
        pytest.raises(
            ConfigError, match=r"reward\.function: reward cannot be sent .*it uses 'lock', of type _thread.lock"
        ),
        objects.written(),
    ):
        pass
    assert not (tmp_path / "runs" / ".rl-1.python").exists()


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"reward": {"function": ROWS[0]}}, r"reward\.function: given dict, must be a path, or a function"),
        ({"data": {"path": len}}, r"data\.path: given builtin_function_or_method, must be a path, or a datasets"),
        ({"components": {"mine": {"path": len}}}, r"components\.mine\.path: given .*, must be a path, or a class"),
        ({"rollout": {"batch_size": object()}}, r"rollout\.batch_size: given object, which is neither text nor"),
        ({"actor": {"model": object()}}, r"actor\.model: given object, must be a path, or a model of transformers"),
    ],
)
def test_objects_where_none_fits_are_refused_by_their_key(values, problem):
    with pytest.raises(ConfigError, match=problem):
        ScriptObjects().replace(values)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "there are no rows"),
        ([1], "row 0 is int, must be a dict of columns"),
        ([{"image": object()}], "row 0: a column has object, which JSON does not know; a datasets.Dataset may have"),
        (
            [{"at": datetime(2026, 1, 2)}],
            "row 0: a column has datetime.datetime, which JSON does not know; a datasets.Dataset",
        ),
        (DatasetDict(train=Dataset.from_list(ROWS[:1])), r"give one of them, such as \['train'\]"),
    ],
)
def test_rows_that_cannot_be_read_are_refused(tmp_path, rows, problem):
    objects, _ = made(tmp_path, "data.path", rows)
    with pytest.raises(ConfigError, match=problem), objects.written():
        pass


def test_the_run_keeps_sources_and_says_what_has_changed(tmp_path):
    def reward(queries, prompts, labels):
        return [1.0 for _ in queries]

    notes: list[str] = []
    objects, _ = made(tmp_path, "reward.function", reward)
    objects.record(tmp_path, notes.append)
    kept = json.loads((tmp_path / RECORD).read_text())["objects"]["reward.function"]
    assert any("return [1.0 for _ in queries]" in source for source in kept["sources"].values())
    assert notes == []

    def reward(queries, prompts, labels):
        return [2.0 for _ in queries]

    objects, _ = made(tmp_path, "reward.function", reward)
    objects.record(tmp_path, notes.append)
    assert notes == ["reward.function: reward of the script has changed since the run began"]
    assert not list(tmp_path.glob("**/*.pkl"))


def test_a_change_of_what_a_function_uses_is_said(tmp_path):
    factor = 1.0

    def helper(query):
        return factor * len(query)

    def reward(queries, prompts, labels):
        return [helper(query) for query in queries]

    notes: list[str] = []
    for factor in (1.0, 1.0, 2.0):  # noqa: B007 (the closure reads it)
        objects, _ = made(tmp_path, "reward.function", reward)
        objects.record(tmp_path, notes.append)
    assert notes == ["reward.function: reward of the script has changed since the run began"]


def test_values_that_a_function_reads_are_not_kept(tmp_path):
    password = "correct horse"

    def reward(queries, prompts, labels):
        return [float(len(password)) for _ in queries]

    objects, _ = made(tmp_path, "reward.function", reward)
    objects.record(tmp_path, print)
    assert "horse" not in (tmp_path / RECORD).read_text()


def test_a_class_of_the_script_stays_as_it_is_where_it_runs_in_this_process(tmp_path):
    class Adder(Environment):
        pass

    objects, path = made(tmp_path, "agent.path", Adder)
    with objects.written():
        agent = load_agent(path, None, max_length=8)
    assert Adder.__module__ == __name__
    assert type(agent.env_factory()) is not Adder


def test_a_function_is_an_agent_under_any_name_and_an_environment_object_is_none(tmp_path):
    async def chat(prompt, client):
        return 1.0

    _, path = made(tmp_path, "agent.path", chat)
    assert path.endswith(":play")
    with pytest.raises(ConfigError, match="must be a path, or a class of agents .*: give the class Environment itself"):
        ScriptObjects().replace({"agent": {"path": Environment()}})
