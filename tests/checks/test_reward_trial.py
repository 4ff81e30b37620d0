"""The call of a reward function before a run starts: what it refuses, what it warns of, and what it leaves alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_shells import make_shell

from hotseat.checks.pipeline import check_user_code
from hotseat.checks.reward_columns import label_hint
from hotseat.checks.reward_trial import TrialRow, trial_row
from hotseat.config import loads
from hotseat.errors import UserError
from hotseat.types import Prompt

FIRST_ROW = "called as for the first row of rows.jsonl, 3 times: prompt '1+1=', label 2, and the label as the answer"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with a model, rows and no reward file yet."""
    make_shell(tmp_path / "model", model_type="llama", max_position_embeddings=32)
    (tmp_path / "rows.jsonl").write_text('{"input": "1+1=", "label": 2}\n{"input": "1+2=", "label": 3}\n')
    (tmp_path / "run.yaml").write_text(
        "{actor: {model: model}, data: {path: rows.jsonl, label_key: label, max_length: 16}, name: mine,"
        " reward: {function: reward.py, trial_timeout_s: 60}, rollout: {samples_per_prompt: 3}}"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


def tried(here: Path, body: str, *overrides: str) -> list[str]:
    """The notes of a trial of a reward function with this body, which begins on line 3."""
    (here / "reward.py").write_text(f"import math\ndef reward_func(queries, prompts, labels):\n    {body}\n")
    patient = "reward.trial_timeout_s=300"  # a process is started, which takes its time on a busy machine
    return check_user_code(loads((here / "run.yaml").read_text(), [patient, *overrides]), lambda text: None)


def test_a_function_that_scores_the_first_row_passes_without_a_word(here):
    checks = "assert (queries, prompts, labels) == (['1+1=2'] * 3, ['1+1='] * 3, [2] * 3)"
    assert tried(here, f"{checks}; return [1.0, None, 0.5]") == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return [0.5]", "returned 1 rewards for 3 samples"),
        ("return ['1', '0', '1']", "returned rewards with '1' for sample 0, not a number"),
        ("print(prompts)", "returned None"),
        ("return {'reward': [0.0] * 3}", "returned a dict with the key 'reward': did you mean 'rewards'?"),
        ("return [score(q) for q in queries]", "raised NameError: name 'score' is not defined at line 3"),
        ("import no_such_package", "raised ModuleNotFoundError: No module named 'no_such_package' at line 3"),
    ],
)
def test_what_no_answer_can_cause_is_refused_with_line_call_and_result(here, body, problem):
    with pytest.raises(UserError) as caught:
        tried(here, body)
    text = str(caught.value)
    assert text.startswith("this run cannot start:\n  reward.function: reward.py:2: reward_func ")
    assert f"reward_func {problem}\n    {FIRST_ROW}\n" in text
    assert "reward.trial_timeout_s=0 starts without this trial" in text
    assert ("returned: [0.5]" in text) == (body == "return [0.5]")


def test_a_file_that_cannot_be_loaded_is_refused(here):
    with pytest.raises(UserError, match=r"reward_func cannot be loaded: ValueError: no key at line 4"):
        tried(here, "return [0.0] * 3\nraise ValueError('no key')")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("raise ConnectionError('no server')", "raised ConnectionError: no server at line 3"),
        ("return [math.nan] * 3", "scored no sample: the reward is nan\n"),
        ("return [None] * 3", "scored no sample: the reward is None\n"),
        ("import os; os._exit(3)", "its process exited with code 3"),
    ],
)
def test_what_an_answer_can_cause_is_a_warning(here, body, problem):
    [note] = tried(here, body)
    assert note.startswith(f"warning: reward.function: reward.py:2: reward_func {problem}")
    assert FIRST_ROW in note
    assert note.endswith("more than 10% of a step's samples have no reward (reward.max_failed_fraction)")


def test_a_package_that_another_machine_may_have_is_a_warning_on_a_cluster(here, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    [note] = tried(here, "import no_such_package")
    assert note.startswith("warning: reward.function")
    assert "no_such_package" in note


@pytest.mark.slow
@pytest.mark.parametrize("where", ["call", "load"])
def test_a_function_that_hangs_does_not_hang_the_start(here, where):
    body = "import time; time.sleep(1000)" if where == "call" else "pass\nimport time; time.sleep(1000)"
    assert tried(here, body, "reward.trial_timeout_s=0.5") == [
        "reward.function: reward.py was not tried: no answer within 0.5 s (reward.trial_timeout_s)"
    ]


def test_no_call_is_made_with_a_limit_of_zero_or_of_a_built_in_function(here):
    assert tried(here, "return [0.5]", "reward.trial_timeout_s=0") == []
    assert tried(here, "return [0.5]", "reward.function=exact_match") == []


def test_the_function_of_evaluations_is_tried_too(here):
    (here / "other.py").write_text("def judge(queries, prompts, labels):\n    return 1.0\n")
    with pytest.raises(UserError, match=r"eval.reward: other.py:1: judge returned 1 rewards for 4 samples"):
        tried(here, "return [0.5] * 3", "eval.path=rows.jsonl", "eval.reward=other.py:judge")


def test_rows_that_cannot_be_read_at_once_are_made_up_and_what_they_cause_is_not_said(here):
    assert tried(here, "return [float(label == '5') for label in labels]", "data.path=some/name") == []
    assert tried(here, "raise KeyError(prompts[0])", "data.path=some/name") == []
    [note] = tried(here, "return []", "data.path=some/name")
    assert note.startswith("warning: reward.function: ")
    assert "called as for a made-up row, 3 times: prompt '1 + 1 = ', label '2'" in note
    data_dependent = "if labels[0] == '9':\n        want = 1\n    return [want for label in labels]"
    assert tried(here, data_dependent, "data.path=some/name") == []
    with pytest.raises(UserError, match="raised NameError"):
        tried(here, "return [wnat for label in labels]", "data.path=some/name")


def test_what_lies_in_the_folder_of_the_command_can_be_imported_where_ray_runs_it(here, monkeypatch):
    """As in Ray's workers. The command itself may not have that folder on its path."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(here))])
    (here / "mylib.py").write_text("ONE = 1.0\n")
    (here / "rewards").mkdir()
    text = "from mylib import ONE\ndef reward_func(queries, prompts, labels):\n    return [ONE for label in labels]\n"
    (here / "rewards" / "sums.py").write_text(text)
    assert tried(here, "...", "reward.function=rewards/sums.py") == []
    with pytest.raises(UserError, match="No module named 'mylib'"):
        tried(here, "...", "reward.function=rewards/sums.py", "cluster.runtime=local")


def test_a_row_without_its_label_is_left_to_the_check_of_the_data(here):
    (here / "null.jsonl").write_text('{"input": "a", "label": null}\n')
    assert tried(here, "return [float(label) for label in labels]", "data.path=null.jsonl") == []


@pytest.mark.parametrize(
    ("row", "overrides", "prompt", "label", "answer"),
    [
        ({"input": "a", "label": "b"}, (), "a", "b", "b"),
        ({"input": "a", "label": [1, "é"]}, (), "a", [1, "é"], '[1, "é"]'),
        ({"input": "a"}, ("data.label_key=null",), "a", "", "an answer"),
        ({"input": "a", "label": "b"}, ("data.input_template='Q: {} A:'",), "Q: a A:", "b", "b"),
        (
            {"input": [{"role": "user", "content": "a"}], "label": "b"},
            ("data.apply_chat_template=true",),
            "a",
            "b",
            "b",
        ),
    ],
)
def test_the_first_row_stands_in_for_all(here, row, overrides, prompt, label, answer):
    (here / "rows.jsonl").write_text(json.dumps(row))
    config = loads((here / "run.yaml").read_text(), overrides)
    assert trial_row(config, config.data.path) == TrialRow(
        prompt, label, answer, "rows.jsonl", {**row, "prompt": row["input"]}
    )


@pytest.mark.parametrize("label_key", ["null", "empty"])
def test_without_labels_a_function_that_fails_gets_a_hint_with_the_columns(here, label_key):
    (here / "rows.jsonl").write_text('{"input": "1+1=", "answer": "2", "empty": "", "source": "x"}\n')
    [note] = tried(here, "return [1.0 / len(label) for label in labels]", f"data.label_key={label_key}")
    assert "raised ZeroDivisionError" in note
    why = "data.label_key is not set" if label_key == "null" else "under data.label_key 'empty' every label is empty"
    others = "answer, empty, source" if label_key == "null" else "answer, source"
    assert f'hint: {why}, so every label is "": set it to one of the other columns: {others}\n' in note
    assert tried(here, "return [1.0] * 3", f"data.label_key={label_key}") == []


def test_the_hint_is_for_runs_whose_prompts_have_no_label_at_all(here):
    config = loads((here / "run.yaml").read_text(), ["data.label_key=null"])
    (here / "reward.py").write_text("def reward_func(queries, prompts, labels): ...\n")
    unlabelled = [Prompt(0, "1+1=", (1,)), Prompt(1, "1+2=", (1,))]
    assert label_hint(config, unlabelled).endswith("set it to one of the other columns: label")
    assert label_hint(config, [*unlabelled, Prompt(2, "q", (1,), label=0)]) == ""
    (here / "reward.py").write_text("def reward_func(completions, label, **kwargs): ...\n")
    assert label_hint(config, unlabelled) == ""  # it gets the columns themselves


@pytest.mark.slow
def test_a_broken_function_ends_the_command_before_a_heavy_library_is_imported(here):
    (here / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return [0.0]\n")
    code = "import sys; from hotseat.cli.main import main; print(main(['run', 'run.yaml']));"
    code += "print(sorted({'torch', 'transformers', 'ray', 'numpy', 'datasets'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.stdout.splitlines()[-2:] == ["2", "[]"], done.stderr
    assert "reward.py:1: reward_func returned 1 rewards for 3 samples" in done.stderr
    assert not (here / "runs").exists()
