"""Graders: verdicts, weights, and failures that are no zeros."""

import json
import os
import signal
import sys

import pytest

from hotseat.errors import RunError, UserError
from hotseat.failed import Failed
from hotseat.rewards import Grader, Graders, RewardFunction, Score
from hotseat.rewards.graders import grader_problem, package_problem
from hotseat.rewards.sandbox import SandboxSettings
from hotseat.rewards.sandbox_limits import children_of

pytestmark = pytest.mark.slow
WIDE = 60.0  # seconds, against hangs
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
GRADERS = (
    Grader("exact", "exact"),
    Grader("number", "number", 10.0),
    Grader("regex", "hashes", 100.0, pattern=r"####\s*-?\d"),
    Grader("json", "json", 1000.0, json_schema=SCHEMA),
)
CATASTROPHE = r"^(a+)+$"  # takes 2^n steps on n letters and another one
ATTACK = "__import__('os').system('touch {}')"


@pytest.fixture(scope="module")
def graders():
    with Graders(GRADERS) as made:
        yield made


def scores(graders: Graders, answers: list[str], label: str | None) -> list[Score | Failed]:
    ids = [f"0/0/{number}" for number in range(len(answers))]
    prompts = ["Q:"] * len(answers)
    return graders.submit([f"Q:{answer}" for answer in answers], prompts, [label] * len(answers), ids).result(WIDE)


def test_the_reward_is_the_weighted_sum_and_each_verdict_is_logged(graders):
    answers = ["18", "so it is 18 in all", "9 and 9 is\n#### 18</s>", "#### 17", '{"age": 18}', "no"]
    found = scores(graders, answers, "18")
    assert [each.reward for each in found] == [11, 10, 110, 100, 1010, 0]
    assert [each.score for each in found] == [11, 10, 110, 100, 1010, 0]
    assert found[2].extra == {"exact": 0, "number": 1, "hashes": 1, "json": 0}


@pytest.mark.parametrize(
    ("label", "answer"), [(18, "18"), (2.5, "2.5"), (["a", 1], '["a", 1]'), ({"b": 2}, '{"b": 2}')]
)
def test_a_label_of_any_type_is_compared_as_its_json_text(graders, label, answer):
    right, wrong = scores(graders, [answer, "17"], label)
    assert (right.extra["exact"], wrong.extra["exact"]) == (1.0, 0.0)


def test_numbers_as_gsm8k_writes_them(graders):
    label = "She has 16 - 3 - 4 = 9 eggs, and 9 * 2 = 1,018 dollars.\n#### 1,018"
    answers = ["#### 1018", "#### $1,018.00 in 7 days", "1018", "#### 7 of 1018", "#### none", "1018 is 7"]
    assert [each.extra["number"] for each in scores(graders, answers, label)] == [1, 1, 1, 0, 0, 0]


def test_json_that_fits_its_schema(graders):
    fits = ['{"age": 3}', '```json\n{"age": 3}\n```', 'Here:\n```\n{"age": 3, "name": "x"}\n```']
    does_not = ['{"age": "3"}', "{}", "age: 3", '{"age": NaN}', "[" * 100_000, '{"age": 3} and more']
    found = scores(graders, [*fits, *does_not], "1")
    assert [each.extra["json"] for each in found] == [1, 1, 1, 0, 0, 0, 0, 0, 0]


def test_a_grader_that_cannot_judge_fails_the_sample_with_the_reason(graders):
    [unlabelled] = scores(graders, ["18"], None)
    assert scores(graders, ["18"], "") == [unlabelled]  # what a run without data.label_key has
    assert unlabelled == Failed("grader exact: the row has no label (sample 0/0/0)")
    [no_number] = scores(graders, ["18"], "eighteen")
    assert no_number == Failed("grader number: the label has no number: 'eighteen' (sample 0/0/0)")


def test_answers_are_not_executed_and_later_samples_are_unaffected(graders, tmp_path):
    """Scenario 44."""
    attack = ATTACK.format(tmp_path / "executed")
    found = scores(graders, [attack, f"#### {attack}", json.dumps({"age": attack}), "18"], "18")
    assert [each.reward for each in found] == [0, 0, 0, 11]
    assert not (tmp_path / "executed").exists()


def test_a_catastrophic_pattern_is_cut_off_and_the_next_answer_is_judged():
    """Scenario 52."""
    with Graders([Grader("regex", "letters", timeout_s=3.0, pattern=CATASTROPHE)]) as graders:
        late, right, wrong = scores(graders, ["a" * 60 + "b", "aaa", "bbb"], None)
        assert late == Failed("grader letters: no verdict within 3 s (sample 0/0/0)")
        assert (right.reward, wrong.reward) == (1.0, 0.0)


def test_a_schema_with_a_catastrophic_pattern_is_cut_off():
    schema = {"type": "string", "pattern": CATASTROPHE}
    with Graders([Grader("json", "json", timeout_s=3.0, json_schema=schema)]) as graders:
        late, right = scores(graders, [json.dumps("a" * 60 + "b"), '"aaa"'], None)
        assert late == Failed("grader json: no verdict within 3 s (sample 0/0/0)")
        assert right.reward == 1.0


def test_an_answer_of_spaces_takes_no_time(graders):
    [found] = scores(graders, [" " * 100_000 + "x" + " " * 100_000 + "<"], "18")
    assert found.reward == 0.0


def test_a_process_killed_from_outside_is_replaced():
    """Scenario 52."""
    before = set(children())
    with Graders([Grader("exact", "exact", timeout_s=WIDE)]) as graders:
        assert scores(graders, ["18"], "18")[0].reward == 1.0
        own = set(children()) - before
        assert own
        for pid in own:
            os.kill(pid, signal.SIGKILL)
        assert scores(graders, ["18"], "18")[0].reward == 1.0


def test_closing_ends_the_processes_and_what_was_submitted():
    before = set(children())
    graders = Graders([Grader("regex", "letters", timeout_s=WIDE, pattern=CATASTROPHE)])
    ids = ["0/0/0"]
    waiting = [graders.submit(["a" * 60 + "b"], [""], [None], ids) for _ in range(2)]
    graders.close()
    for future in waiting:
        with pytest.raises(RunError, match="closed before they scored all samples"):
            future.result(WIDE)
    with pytest.raises(RunError, match="graders: closed"):
        graders.submit(["a"], [""], [None], ids)
    assert set(children()) <= before


def test_a_function_is_added_with_its_logs(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    return {'rewards': [None if 'x' in q else 0.25 for q in queries], 'scores': [0.5] * len(queries),"
        " 'extra_logs': {'size': len(queries)}}\n"
    )
    function = RewardFunction(file, retries=0)
    with Graders([Grader("exact", "exact", 2.0)], function=function) as graders:
        right, failed = scores(graders, ["18", "x"], "18")
        assert right == Score(2.25, 2.5, {"exact": 1.0, "function": 0.25, "size": 2.0})
        assert isinstance(failed, Failed)
        assert "the reward is None" in failed.reason
    function = RewardFunction(file, retries=0)
    with Graders([Grader("exact", "size")], function=function) as graders:
        [clash] = scores(graders, ["18"], "18")
        assert clash == Failed("extra_logs of the reward function has 'size', the name of a grader: rename one")


def children() -> list[int]:
    """Return the processes that this one started."""
    return children_of(os.getpid())


# --- options ----------------------------------------------------------------------------------------------------------


def test_bad_patterns_and_schemas_are_described():
    assert grader_problem(Grader("regex", "x", pattern="a(b")) == (
        "pattern 'a(b' is no regular expression of Python's re: missing ), unterminated subpattern at position 1"
    )
    problem = grader_problem(Grader("json", "x", json_schema={"properties": {"age": {"type": "number "}}}))
    assert problem.startswith("json_schema is no JSON schema: 'number ' is not valid under any of the given schemas")
    assert problem.endswith("(at properties/age/type)")
    with pytest.raises(UserError, match="grader x: pattern"):
        Graders([Grader("regex", "x", pattern="a(b")])
    assert grader_problem(GRADERS[2]) is None
    assert grader_problem(GRADERS[3]) is None


def test_a_missing_package_is_named(monkeypatch):
    assert package_problem("math") is None
    assert package_problem("regex") is None
    monkeypatch.setitem(sys.modules, "math_verify", None)  # as if it were not installed
    assert package_problem("math") == "kind math needs the package math-verify: pip install 'hotseat[graders]'"
    with pytest.raises(UserError, match="grader formula: kind math needs the package math-verify"):
        Graders([Grader("math", "formula")])


def test_a_broken_sandbox_is_refused_when_graders_start():
    settings = SandboxSettings(command=("/no/runner", "{folder}"))
    with pytest.raises(UserError, match="the sandbox for generated code does not work on .*: /no/runner cannot be"):
        Graders([Grader("code", "code")], sandbox=settings)


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        (None, "the row has no label"),
        ("", "the row has no label"),
        (5, "the label is no list of tests"),
        ([{"input": "2", "output": 5}], "test 0 of the label is neither"),
        ("5", "the label is no list of tests"),
        ("five", "the label is not JSON"),
        ("[]", "the label is no list of tests"),
        ('[{"input": "2", "output": 5}]', "test 0 of the label is neither"),
        ('[{"call": "f()", "result": 1}, {"call": "f()"}]', "test 1 of the label is neither"),
    ],
)
def test_tests_that_cannot_be_read_are_failed_samples(label, reason, tmp_path):
    runner = tmp_path / "runner"
    runner.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$1"\n')
    runner.chmod(0o755)
    settings = SandboxSettings(command=(str(runner), "{folder}/main.py"))
    with Graders([Grader("code", "code")], sandbox=settings) as graders:
        [failed] = scores(graders, ["print(1)"], label)
        assert failed.reason.startswith(f"grader code: {reason}")


# --- formulas ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def math():
    with Graders([Grader("math", "math", timeout_s=WIDE)]) as made:
        yield made


def test_formulas_that_are_equal(math):
    equal = [
        (r"\frac{1}{2}", r"So it is $\frac{2}{4}$."),
        ("0.5", r"\boxed{1/2}"),
        ("1,234", "#### 1234"),
        ("x^2 + 1", "$1 + x^2$"),
        (r"The answer is \boxed{18}.", "18"),
        (r"44\%", r"\boxed{44\%}"),
        (r"\boxed{44\%}", "$44$"),
        (r"\$18.90", r"\boxed{\$18.90}"),
    ]
    assert [scores(math, [answer], label)[0].reward for label, answer in equal] == [1.0] * len(equal)
    assert [each.reward for each in scores(math, ["17", "$x$", "nothing"], "18")] == [0.0] * 3
    assert scores(math, ["18"], " ")[0] == Failed("grader math: math-verify cannot read the label: ' ' (sample 0/0/0)")
    assert scores(math, ["18", "17"], 18) == [Score(1.0, 1.0, {"math": 1.0}), Score(0.0, 0.0, {"math": 0.0})]


def test_formulas_are_not_executed(math, tmp_path):
    """Scenario 44."""
    attack = ATTACK.format(tmp_path / "executed")
    answers = [attack, f"${attack}$", rf"\boxed{{{attack}}}", f"the answer is {attack}", "18"]
    assert [each.reward for each in scores(math, answers, "18")] == [0, 0, 0, 0, 1]
    assert not (tmp_path / "executed").exists()


def test_a_formula_that_takes_too_long_is_a_failed_sample_and_the_next_is_judged():
    """Scenario 52."""
    with Graders([Grader("math", "math", timeout_s=6.0)]) as graders:
        late, right = scores(graders, ["$9^{9^{9^{9}}} - 9^{9^{9^{8}}}$", "18"], "18")  # no signal interrupts this
    assert late == Failed("grader math: no verdict within 6 s (sample 0/0/0)")
    assert right.reward == 1.0
