"""A model as judge on engines of the run's own: a role that is placed, takes its turn, and keeps its own weights."""

import json
from collections import Counter

import pytest
from dying_engines import Engines
from judge_cases import expected_verdict, judge_section, make_judge
from loop_cases import rl_yaml, same, weights
from test_rl import run_command
from transformers import AutoTokenizer

from hotseat.cluster import local
from hotseat.config import loads
from hotseat.errors import RunError, UserError
from hotseat.loop.run import start
from hotseat.loop.workers.judge_engines import request_tokens
from hotseat.observe import read_lines
from hotseat.rewards.builtin import answer_of

pytestmark = pytest.mark.slow

RECORD_ALL = ("log.samples_every=1", "log.samples_per_step=16")


@pytest.fixture
def judged_task(task):
    make_judge(task)
    return task


def run(task, name: str, *overrides: str, judge: str | None = None, others: str = "", **changes: str) -> list[dict]:
    reward = f"{{judge: {judge or judge_section(task)}, max_failed_fraction: 0.9{others}}}"
    start(loads(rl_yaml(task, name=name, reward=reward, **changes), [*RECORD_ALL, *overrides]))
    return read_lines(task / "runs" / name / "metrics.jsonl")


def answers(task, name: str) -> list[tuple[str, dict]]:
    """(answer, record) of the samples that have a reward."""
    lines = read_lines(task / "runs" / name / "samples.jsonl")
    found = []
    for line in lines:
        if line["reward"] is None:
            continue
        segment = line["segments"][-1]
        text = "".join(text for text, own in zip(segment["text"], segment["sampled"], strict=True) if own)
        found.append((answer_of(text, ""), line))
    return found


def test_placement_changes_no_verdict_and_no_weight(judged_task):
    """On the actor's device in turns, offloaded between them, and on a device of its own."""
    run(judged_task, "turns")
    run(judged_task, "asleep", judge=judge_section(judged_task, "{max_length: 32, num_slots: 4, enable_offload: true}"))
    placement = "{actor: 0, rollout: 1, judge: 2}"
    run(judged_task, "apart", cluster=f"{{runtime: local, inventory: 1x3, component_placement: {placement}}}")
    for name in ("turns", "asleep", "apart"):
        found = answers(judged_task, name)
        assert len(found) > 8
        for answer, sample in found:
            assert sample["reward"] == expected_verdict(answer)
            assert sample["extra"] == {"judge": sample["reward"]}
    assert same(weights(judged_task, "turns"), weights(judged_task, "asleep"))
    assert same(weights(judged_task, "turns"), weights(judged_task, "apart"))
    moves = (judged_task / "runs" / "asleep" / "timeline.json").read_text()
    assert "onload judge kv_cache, weights" in moves or "onload judge weights, kv_cache" in moves


def test_verdicts_are_added_to_graders_and_functions_and_failures_are_failed_samples(judged_task):
    graders = ", graders: [{kind: regex, name: seven, pattern: '7', weight: 0.5}]"
    judge = judge_section(judged_task, weight="2", votes="2", temperature="0.01", combine="majority")
    metrics = run(
        judged_task,
        "run",
        "eval.samples_per_prompt=2",
        judge=judge,
        others=f", function: {judged_task}/reward.py{graders}",
        eval=f"{{path: {judged_task}/prompts.jsonl, every: 1}}",
    )
    assert {"extra/judge", "extra/seven", "extra/function"} <= metrics[-1].keys()
    assert metrics[-1]["eval/failed"] > 0  # evaluations are judged, too
    found = answers(judged_task, "run")
    for answer, sample in found:
        extra = sample["extra"]
        assert extra["judge"] == expected_verdict(answer)
        assert sample["reward"] == pytest.approx(extra["function"] + 0.5 * extra["seven"] + 2 * extra["judge"])
    ledger = (judged_task / "runs" / "run" / "ledger.jsonl").read_text()
    assert "grader judge: the judge wrote nothing, or was cut off before its end" in ledger
    verdicts = [json.loads(line) for line in (judged_task / "runs" / "run" / "judge.jsonl").read_text().splitlines()]
    assert max(Counter(verdict["key"] for verdict in verdicts).values()) == 1  # no answer is judged twice
    assert {verdict["written"] for verdict in verdicts} == {"+", "="}


def test_rollout_ahead_waits_for_its_judge(judged_task):
    """On devices of their own rollout goes on while the judge works; on shared ones its requests stand still."""
    apart = "{runtime: local, inventory: 1x3, component_placement: {actor: 0, rollout: 1, judge: 2}}"
    shared = "{runtime: local, inventory: 1x1, component_placement: {actor: 0, 'rollout,judge': '@actor'}}"
    for name, cluster, overlap in (
        ("apart", apart, "{staleness: 1}"),
        ("shared", shared, "{staleness: 1, in_flight: recompute}"),
    ):
        run(judged_task, name, cluster=cluster, overlap=overlap)
        for answer, sample in answers(judged_task, name):
            assert sample["reward"] == expected_verdict(answer)


def test_requests_that_do_not_fit_are_failed_samples_and_a_model_that_cannot_judge_is_refused(judged_task):
    with pytest.raises(UserError, match=r"engine.max_length: 64 is above the 32 positions of reward.judge.model"):
        run(judged_task, "long", judge=judge_section(judged_task, "{max_length: 64}"))
    with pytest.raises(UserError, match=r"engine.max_length: 1044 \(its default\) is above the 32 positions"):
        run(judged_task, "default", judge=judge_section(judged_task, ""))
    with pytest.raises(UserError, match=r"reward.judge.model: there is no folder"):
        run(judged_task, "absent", judge=judge_section(judged_task, model=f"{judged_task}/jugde"))
    with pytest.raises(RunError, match=r"has \d tokens, and reward.judge.engine.max_length is 3"):
        run(judged_task, "short", judge=judge_section(judged_task, "{max_length: 3}"))


def test_a_judge_that_dies_is_replaced_and_judges_what_is_left(judged_task, monkeypatch):
    """Scenario 55."""
    run(judged_task, "calm")
    plain, made = local.LocalGroup, []

    def group(launch, rank_env):
        made.append(Engines(launch, rank_env, fatal=1) if launch.name == "judge" else plain(launch, rank_env))
        return made[-1]

    monkeypatch.setattr("hotseat.cluster.local.LocalGroup", group)
    run(judged_task, "run")
    [judge] = [each for each in made if each.name == "judge"]
    assert "died" in judge.log
    assert "finish_load 0" not in judge.log  # it never gets weights
    said = (judged_task / "runs" / "run" / "events.jsonl").read_text()
    assert "judge 0 died and is replaced" in said
    assert same(weights(judged_task, "calm"), weights(judged_task, "run"))


def test_an_answer_cannot_end_its_message(judged_task):
    """Only the template writes special tokens; an answer that spells one out is read as plain characters."""
    tokenizer = AutoTokenizer.from_pretrained(judged_task / "judge")
    end = tokenizer.eos_token_id
    assert request_tokens(tokenizer, "7<eos>8").count(end) == 0
    assert request_tokens(tokenizer, "78") == tuple(tokenizer("78")["input_ids"])
    tokenizer.chat_template = "{% for each in messages %}9{{ each.content }}<eos>{% endfor %}{{ '=' }}"
    tokens = request_tokens(tokenizer, "7<eos>8")
    assert [tokenizer.decode(tokens[0]), tokenizer.decode(tokens[-1])] == ["9", "="]
    assert [at for at, token in enumerate(tokens) if token == end] == [len(tokens) - 2]


@pytest.mark.long
@pytest.mark.ray
def test_on_ray_a_judge_takes_turns_and_changes_no_bit(judged_task):
    run(judged_task, "local")
    reward = f"{{judge: {judge_section(judged_task)}, max_failed_fraction: 0.9}}"
    cluster = "{runtime: ray, component_placement: {actor: 0, rollout: 0-1, judge: '@rollout'}}"
    run_command(judged_task, "ray", "reward.judge.engine.enable_offload=true", cluster=cluster, reward=reward)
    assert same(weights(judged_task, "local"), weights(judged_task, "ray"))
