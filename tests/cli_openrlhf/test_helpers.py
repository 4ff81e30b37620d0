"""What OpenRLHF's example files import from `openrlhf`, for reward files and agents, without OpenRLHF."""

import sys
from pathlib import Path

import pytest
from agent_cases import TOKENIZER, Script, play

from hotseat.agents import load_agent
from hotseat.openrlhf import helpers
from hotseat.openrlhf.helpers import extract_boxed_answer, grade_answer
from hotseat.rewards import RewardFunction

WAIT_S = 300.0
# As `math_reward_func.py` of OpenRLHF 0.9.3 and later: tensors of rewards by the two helpers.
REWARD = """
import torch
from openrlhf.utils import extract_boxed_answer, grade_answer

def reward_func(queries, prompts, labels, **kwargs):
    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    right = [float(grade_answer(extract_boxed_answer(text), label)) for text, label in zip(answers, labels)]
    rewards = torch.tensor(right)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"accuracy": rewards.mean()}}
"""
AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.utils import extract_boxed_answer

class AgentInstance(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        from openrlhf.utils.math_utils import grade_answer  # after the file has been loaded

        right = float(grade_answer(extract_boxed_answer(states["action_text"]), states["label"]))
        return {"rewards": right, "environment_feedback": "", "done": True}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} and then \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{}", ""),
        (r"\boxed{never closed {1}", None),
        ("no box: {42}", None),
        ("", None),
    ],
)
def test_the_answer_in_the_last_box(text, answer):
    assert extract_boxed_answer(text) == answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "truth"),
    [
        ("42", 42),
        (" 42. ", "42"),
        ("1,234", "1234"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        ("0.5", r"\frac{1}{2}"),
        ("1/2", "0.5"),
        (r"\text{Monday}", "monday"),
        ("x^2+1", "1+x^2"),
        (r"\left(1, 2\right)", "(1,2)"),
    ],
)
def test_answers_that_are_equal(given, truth):
    assert grade_answer(given, truth)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "truth"),
    [
        ("41", "42"),
        (None, "42"),
        ("42", None),
        ("", "42"),
        ("x^2", "x^3"),
        ("12,34", "1234"),
        ("Monday", "Friday"),
        ("1/3", "0.3"),
    ],
)
def test_answers_that_are_not(given, truth):
    assert not grade_answer(given, truth)


@pytest.mark.slow
def test_answers_are_not_evaluated(tmp_path):
    attack = f"__import__('pathlib').Path({str(tmp_path / 'trace')!r}).touch()"
    assert not grade_answer(attack, "42")
    assert not (tmp_path / "trace").exists()


def test_without_math_verify_the_package_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)  # as if it were not installed
    with pytest.raises(
        ModuleNotFoundError, match=r"needs the package math-verify here: pip install 'hotseat\[graders\]'"
    ):
        grade_answer(None, "42")


def scores_of(file: Path) -> list[float]:
    with RewardFunction(file, retries=0, timeout_s=WAIT_S) as function:
        queries = [r"q so it is \boxed{0.50}", r"q \boxed{3}", "q no"]
        scores = function.submit(queries, ["q"] * 3, [r"\frac{1}{2}"] * 3, ["0/0/0", "0/0/1", "0/0/2"]).result(WAIT_S)
    return [score.reward for score in scores]


@pytest.mark.slow
def test_a_reward_file_of_openrlhfs_examples_is_used_unchanged(tmp_path):
    (tmp_path / "math_reward_func.py").write_text(REWARD)
    assert scores_of(tmp_path / "math_reward_func.py") == [1.0, 0.0, 0.0]


@pytest.mark.slow
def test_openrlhf_itself_is_used_where_it_is_installed(tmp_path):
    (tmp_path / "openrlhf" / "utils").mkdir(parents=True)
    (tmp_path / "openrlhf" / "__init__.py").write_text("")
    (tmp_path / "openrlhf" / "utils" / "__init__.py").write_text(
        "def extract_boxed_answer(text): return text\ndef grade_answer(given, truth): return given == ' no'\n"
    )
    (tmp_path / "reward.py").write_text(REWARD)
    assert scores_of(tmp_path / "reward.py") == [0.0, 0.0, 1.0]


@pytest.mark.long
@pytest.mark.slow
def test_beside_the_package_with_openrlhfs_commands_the_helpers_are_found(tmp_path, monkeypatch):
    from hotseat.openrlhf.shim import DIRECTORY

    monkeypatch.syspath_prepend(str(DIRECTORY))
    (tmp_path / "reward.py").write_text(REWARD)
    assert scores_of(tmp_path / "reward.py") == [1.0, 0.0, 0.0]


@pytest.mark.slow
def test_an_agent_file_imports_them_while_it_loads_and_later(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    (tmp_path / "agent.py").write_text(AGENT)
    scored = play(load_agent(tmp_path / "agent.py", TOKENIZER, max_length=50), Script([r"\boxed{2.0}"]), label=2)
    assert scored.reward == 1.0
    for name in [name for name in sys.modules if name.startswith("openrlhf")]:
        del sys.modules[name]  # or other tests of this process would find it


def test_installing_twice_adds_one_finder(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    helpers.install()
    num_finders = len(sys.meta_path)
    helpers.install()
    assert len(sys.meta_path) == num_finders
