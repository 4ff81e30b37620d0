"""Reward functions of TRL's form: called by names, with what TRL's GRPOTrainer passes."""

import json
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from agent_cases import TOKENIZER

from hotseat.checks.pipeline import DATA, check_user_code
from hotseat.checks.reward_columns import keeps_columns
from hotseat.checks.stage import DataContext, run_checks
from hotseat.config import Config, loads
from hotseat.data import Row, columns_of, make_prompts
from hotseat.errors import UserError
from hotseat.failed import Failed, NotApplicable
from hotseat.loop.workers.collecting import OpenGroup, submit_group
from hotseat.loop.workers.group_facts import Job
from hotseat.rewards import Grader, RewardFunction, Score
from hotseat.rewards.function_worker import ArgumentMissing, named_arguments, takes_names
from hotseat.rewards.graders import add_verdict
from hotseat.rewards.scorer import NamedArguments
from hotseat.types import Episode, Prompt, SampleKey, Segment

WAIT_S = 300.0
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>{% endfor %}assistant: "
PLAIN = [{"prompt": "1+1=", "answer": "2", "level": {"of": [1, None]}}, {"prompt": "1+2=", "answer": "3"}]
TYPED = [
    {
        "prompt": "1+1=",
        "at": datetime(2026, 11, 19, 8, 30, 1, 250, timezone(timedelta(hours=1))),
        "meta": {"days": [date(2026, 1, 2)], "from": time(8, 30), "took": timedelta(-1, 5, 7), "dict": {"bytes": 1}},
        "price": Decimal("0.10"),
        "raw": b"\x00\xff",
    }
]
CHATS = [{"prompt": [{"role": "user", "content": "1+1?"}], "answer": 2, "level": 1.5}]
TEXTS = ("2<eos>", "<eos>", "a long answer")


def as_rows(values: list[dict]) -> list[Row]:
    return [Row(row, "rows.jsonl", number + 1, has_line=True) for number, row in enumerate(values)]


def group_of(prompt: Prompt, texts=TEXTS) -> OpenGroup:
    """A group whose answers are these texts, the prompt before each."""
    episodes = []
    for number, text in enumerate(texts):
        ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        mask = torch.tensor([False] * len(prompt.token_ids) + [True] * len(ids))
        tokens = torch.tensor([*prompt.token_ids, *ids])
        segment = Segment(tokens, mask, torch.zeros(len(tokens)), torch.zeros(len(tokens), dtype=torch.int32))
        episodes.append(Episode(SampleKey(0, prompt.index, number), (segment,), prompt.text + text))
    return OpenGroup(Job(prompt, 0, len(texts)), list(episodes))


class Recorder:
    """A scorer that keeps what it is asked."""

    def submit(self, queries, prompts, labels, ids, named=None) -> Future:
        self.queries, self.named = queries, named
        return Future()


def ours(values: list[dict], function, is_chat: bool, row: int = 0) -> dict:
    """The arguments that a function gets here for one row of some data, after the worker's pipe."""
    rows, template = as_rows(values), TEMPLATE if is_chat else None
    options = {"input_key": "prompt", "apply_chat_template": is_chat, "chat_template": template}
    prompts, _ = make_prompts(rows, TOKENIZER, columns=columns_of(rows)[0], **options)
    recorder = Recorder()
    submit_group(recorder, group_of(prompts[row]), TOKENIZER)
    return named_arguments(function, json.loads(json.dumps(recorder.named.message)))


def anything(prompts, completions, **kwargs):
    return [0.0] * len(prompts)


def test_a_function_with_a_parameter_completions_is_called_by_names():
    def positional(queries, prompts, labels, completions=None, **kwargs): ...
    def by_names(completions, *, answer=None): ...
    def only_more(*args, **kwargs): ...

    assert [takes_names(each) for each in (positional, by_names, anything, only_more, len)] == [
        *(False, True, True, False, False)
    ]


def test_plain_text_comes_as_text_with_the_columns_as_lists():
    got = ours(PLAIN, anything, is_chat=False)
    assert got["prompts"] == ["1+1="] * 3
    assert got["completions"] == ["2", "", "a long answer"]  # without special tokens
    assert [len(ids) for ids in got["completion_ids"]] == [2, 1, 13]  # with them
    assert got["answer"] == ["2"] * 3
    assert got["level"] == [{"of": [1, None]}] * 3
    assert sorted(got) == ["answer", "completion_ids", "completions", "level", "prompts"]
    assert ours(PLAIN, anything, is_chat=False, row=1)["level"] == [None] * 3  # a column that only other rows have


def test_values_of_other_types_come_as_they_are():
    got = ours(TYPED, anything, is_chat=False)
    for name, value in TYPED[0].items():
        assert got["prompts" if name == "prompt" else name] == [value] * 3
    assert type(got["at"][0]) is datetime
    assert got["at"][0].utcoffset() == timedelta(hours=1)
    assert type(got["meta"][0]["days"][0]) is date


def test_conversations_come_as_messages():
    got = ours(CHATS, anything, is_chat=True)
    assert got["prompts"] == [[{"role": "user", "content": "1+1?"}]] * 3
    assert got["completions"][2] == [{"role": "assistant", "content": "a long answer"}]
    assert got["answer"] == [2] * 3


def test_a_function_without_kwargs_gets_what_it_names():
    def picky(completions, answer): ...

    assert sorted(ours(PLAIN, picky, is_chat=False)) == ["answer", "completions"]


def test_what_one_sample_changes_does_not_reach_the_others():
    got = ours(PLAIN, anything, is_chat=False)
    got["level"][0]["of"].clear()
    assert got["level"][1] == {"of": [1, None]}


@pytest.mark.slow
@pytest.mark.parametrize("values", [PLAIN[:1], CHATS, TYPED], ids=["plain", "conversational", "typed"])
def test_the_arguments_are_those_that_trl_passes(values):
    """TRL's own code decodes the answers and calls the function."""
    from trl import GRPOTrainer

    is_chat = values is CHATS
    seen = {}
    ids = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in TEXTS]

    def function(**kwargs):
        seen.update(kwargs)
        return [0.25, 1.0, 0.5]

    trainer = MagicMock(
        tools=None, rollout_func=None, environments=None, environment_factories=None, reward_processing_classes=[None]
    )
    trainer.accelerator.device = torch.device("cpu")
    trainer.accelerator.gather = lambda value: value
    trainer.processing_class = trainer._tokenizer = TOKENIZER
    trainer.eos_token_ids, trainer.state.num_input_tokens_seen = [TOKENIZER.eos_token_id], 0
    trainer._metrics = {"train": defaultdict(list)}
    trainer.reward_funcs, trainer.reward_func_names = [function], ["function"]
    trainer._tokenize_prompts.return_value = ([[1]] * 3, None, {})
    trainer._generate_single_turn.return_value = (ids, None)
    inputs = values * 3
    prompts = [row["prompt"] for row in inputs]
    completions = GRPOTrainer._generate(trainer, prompts)[3]
    rewards = GRPOTrainer._calculate_rewards(trainer, inputs, prompts, completions, ids)
    assert rewards.tolist() == [[0.25], [1.0], [0.5]]

    got = ours(values, anything, is_chat)
    assert {name: seen[name] for name in got} == got
    assert sorted(set(seen) - set(got)) == ["log_extra", "log_metric", "trainer_state"]  # docs/rewards.md names them


def test_an_agents_own_context_leaves_the_answer_from_the_first_sampled_token_on():
    [prompt], _ = make_prompts(as_rows([{"input": "1+1="}]), TOKENIZER, columns=["input"])
    group = group_of(prompt, ["2"])
    changed = Prompt(prompt.index, "other", (1, 2, 3), columns=prompt.columns)
    recorder = Recorder()
    submit_group(recorder, OpenGroup(Job(changed, 0, 1), group.outcomes), TOKENIZER)
    assert recorder.named.completions == ["2"]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PLAIN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


def config_of(here: Path, source: str, *overrides: str):
    (here / "reward.py").write_text(source)
    text = "{actor: {model: m}, data: {path: rows.jsonl, input_key: prompt}, reward: {function: reward.py},"
    text += " rollout: {samples_per_prompt: 2}}"
    return loads(text, ["reward.trial_timeout_s=300", *overrides])


def prompts_of(here: Path) -> list[Prompt]:
    rows = as_rows(PLAIN)
    return make_prompts(rows, TOKENIZER, input_key="prompt", columns=columns_of(rows)[0])[0]


def check_columns(config: Config, prompts: list[Prompt], eval_prompts: Sequence[Prompt] = ()) -> None:
    run_checks(DataContext(config=config, prompts=prompts, eval_prompts=eval_prompts), DATA)


def test_a_column_that_is_required_and_missing_is_refused_with_those_that_there_are(here):
    config = config_of(here, "def reward_func(completions, solution, level, *, trainer_state, seen=1, **kwargs): ...\n")
    assert keeps_columns(config)
    with pytest.raises(UserError) as caught:
        check_columns(config, prompts_of(here))
    assert "reward.function reward.py" in str(caught.value)
    assert "requires solution, trainer_state: no such column. It can have the columns answer, level," in str(
        caught.value
    )


@pytest.mark.parametrize(
    "source", ["def reward_func(queries, prompts, labels): ...\n", "from mine import reward_func\n"]
)
def test_columns_are_kept_unless_the_function_is_called_positionally_for_sure(here, source):
    config = config_of(here, source)
    assert keeps_columns(config) == ("import" in source)
    check_columns(config, prompts_of(here))
    assert not keeps_columns(loads("{actor: {model: m}, reward: {function: exact_match}}"))


def test_what_an_evaluations_function_requires_is_asked_of_its_own_data(here):
    (here / "other.py").write_text("def reward_func(completions, gold): ...\n")
    config = config_of(here, "def reward_func(completions, answer): ...\n", "eval.path=e.jsonl", "eval.reward=other.py")
    check_columns(config, prompts_of(here))
    with pytest.raises(UserError, match=r"eval\.reward other\.py.* requires gold"):
        check_columns(config, prompts_of(here), prompts_of(here))


@pytest.mark.slow
def test_the_trial_calls_it_by_names_and_refuses_a_missing_column(here):
    good = "def reward_func(prompts, completions, answer, **kwargs):\n    assert (prompts, answer) == (['1+1='] * 2,"
    assert check_user_code(config_of(here, f"{good} ['2'] * 2)\n    return [0.0] * 2\n"), lambda text: None) == []
    hidden = "import functools\n@functools.cache\ndef reward_func(completions, solution):\n    pass\n"
    with pytest.raises(UserError, match=r"requires 'solution': no such column \(there are: answer, level\)"):
        check_user_code(config_of(here, hidden), lambda text: None)


def test_a_missing_argument_is_named_with_the_columns():
    def needs(completions, trainer_state): ...

    with pytest.raises(ArgumentMissing, match=r"requires 'trainer_state': no such column \(there are: answer, level\)"):
        ours(PLAIN, needs, is_chat=False)


# --- None: does not apply ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_none_does_not_apply_and_is_not_asked_for_again(tmp_path):
    (tmp_path / "reward.py").write_text(
        "calls = 0\n"
        "async def reward_func(prompts, completions, answer, **kwargs):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    assert type(answer[2]).__name__ == 'Decimal'\n"
        "    return [float(calls), None, float(completions[2] == str(answer[2]))]\n"
    )
    with RewardFunction(tmp_path / "reward.py") as function:
        named = NamedArguments({"prompt": "1+1=", "answer": Decimal(2)}, ["2", "3", "2"], [[1], [2], [1]])
        args = (["1+1=2"] * 3, ["1+1="] * 3, [""] * 3, ["0/0/0", "0/0/1", "0/0/2"])
        first, second, third = function.submit(*args, named).result(WAIT_S)
    assert (first, third) == (Score(1.0, 1.0), Score(1.0, 1.0))  # one call, and so one attempt
    assert isinstance(second, NotApplicable)
    assert second.reason.endswith("reward_func: the reward is None, so it does not apply (sample 0/0/1)")


def test_other_rewards_of_a_sample_count_without_one_that_does_not_apply():
    grader, verdict = Grader("exact", "exact", 2.0), Score(1.0, 1.0)
    assert add_verdict(NotApplicable("none"), grader, verdict, "0/0/0") == Score(2.0, 2.0, {"exact": 1.0})
    assert add_verdict(Failed("broken"), grader, verdict, "0/0/0") == Failed("broken")
