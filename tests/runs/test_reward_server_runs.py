"""Whole runs with reward servers: what they learn, and what happens when servers fail, stay away, hang or lie."""

from pathlib import Path

import pytest
from loop_cases import rl_yaml, same, weights
from reward_servers import FakeServer, HeldPort, sevens, written
from safetensors.torch import load_file

from hotseat.checks.reward_sources import servers
from hotseat.checks.stage import CheckContext, run_checks
from hotseat.config import Config, loads
from hotseat.errors import RewardError, UserError
from hotseat.loop import start as entry
from hotseat.loop.rl.ledger import read_ledger
from hotseat.loop.run import start
from hotseat.observe import read_lines
from hotseat.rewards.addresses import TOKEN

pytestmark = pytest.mark.slow


@pytest.fixture
def server():
    """Starts servers."""
    started = []

    def make(*arguments) -> FakeServer:
        started.append(FakeServer(*arguments))
        return started[-1]

    yield make
    for one in started:
        one.close()


def run(task: Path, name: str, *servers: FakeServer | HeldPort, **options: object) -> list[dict]:
    urls = [server.url for server in servers]
    reward = {"url": urls[0] if len(urls) == 1 else urls, **options}
    source = f"{{function: {task}/reward.py}}" if not urls else str(reward).replace("'", '"')
    start(loads(rl_yaml(task, name=name, reward=source)))
    return read_lines(task / "runs" / name / "metrics.jsonl")


def failed(task: Path, name: str) -> set[int]:
    """Prompts of samples that have no reward."""
    entries = [entry for entry in read_ledger(task / "runs" / name) if entry.state == "failed"]
    return {key.prompt for entry in entries for key in entry.keys}


def test_a_run_learns_the_same_from_servers_as_from_a_function(task, server, monkeypatch):
    """Scenario 26: also from servers of which one is away, and one fails twice; and the token is sent."""
    monkeypatch.setenv(TOKEN, "abc")
    run(task, "function")
    assert not same(weights(task, "function"), load_file(task / "model" / "model.safetensors"))
    one = server()
    run(task, "one", one)
    assert len(one.messages) == 8  # a request for each prompt
    assert {len(message["query"]) for message in one.messages} == {4}
    assert {headers["Authorization"] for headers in one.headers} == {"Bearer abc"}
    assert all(
        query.startswith(prompt) and label == prompt[0]
        for message in one.messages
        for query, prompt, label in zip(message["query"], message["prompts"], message["labels"], strict=True)
    )
    assert any("<eos>" in query for message in one.messages for query in message["query"])
    held = HeldPort()
    fails_twice = server(lambda number, message: (500, "no") if number < 2 else sevens(message))
    run(task, "several", held, fails_twice, server())
    held.close()
    run(task, "fails twice", server(lambda number, message: (500, "no") if number < 2 else sevens(message)))
    for name in ("one", "several", "fails twice"):
        assert same(weights(task, name), weights(task, "function")), name
    assert not any("abc" in path.read_text(errors="replace") for path in (task / "runs").rglob("*.yaml"))


def test_a_server_that_is_down_for_ever_stops_the_run(task):
    """Scenario 27."""
    held = HeldPort()
    with pytest.raises(RewardError, match=f"16 of 16 samples have no reward .*\n.*{held.url}: cannot be reached"):
        run(task, "down", held, timeout_s=2)
    held.close()
    assert not (task / "runs" / "down" / "model").exists()


@pytest.mark.long
def test_a_server_that_hangs_for_one_group_fails_that_group_alone(task, server):
    """Scenario 28: it is counted, and the others are learned from."""
    import asyncio

    async def hang() -> dict:
        await asyncio.sleep(600)
        return {}

    one = server(lambda number, message: hang() if message["prompts"][0] == "3+4=" else sevens(message))
    records = run(task, "hangs", one, timeout_s=8, retries=0, max_failed_fraction=0.5)
    assert sorted(record["samples_failed"] for record in records[1:]) == [0, 4]
    assert failed(task, "hangs") == {2}


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"rewards": [1.0]}, "returned 1 rewards for 4 samples"),
        ({"scores": [1.0] * 4}, "returned a dict without the key 'rewards'"),
    ],
)
def test_a_server_that_lies_stops_the_run_and_nothing_is_learned(task, server, answer, problem):
    """Scenario 29."""
    one = server(lambda number, message: answer)
    with pytest.raises(RewardError, match=rf"{one.url}: {problem}"):
        run(task, "lies", one, retries=0)
    assert not (task / "runs" / "lies" / "model").exists()


def test_a_reward_of_a_server_that_is_no_number_fails_its_sample(task, server):
    """Scenario 30."""

    def respond(number: int, message: dict) -> dict:
        rewards = sevens(message)["rewards"]
        return {"rewards": [float("nan"), *rewards[1:]]}

    records = run(task, "nan", server(respond), max_failed_fraction=0.25)
    assert [(record["samples"], record["samples_failed"]) for record in records[1:]] == [(12, 4), (12, 4)]


def test_a_run_whose_servers_are_away_is_refused_before_a_model_loads(task, server, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    held, one = HeldPort(), server()
    shown: list[str] = []

    def notes_on(config: Config) -> list[str]:
        context = CheckContext(config=config, show=shown.append)
        run_checks(context, [servers])
        return context.notes

    def check(*urls: str) -> list[str]:
        return notes_on(loads(rl_yaml(task, reward=f"{{url: [{', '.join(urls)}]}}")))

    with pytest.raises(UserError, match=rf"no reward server can be reached\n  reward.url {held.url}: port \d+ of 127"):
        entry.start(loads(rl_yaml(task, reward=f"{{url: {held.url}}}")))
    assert check(one.url) == []
    assert shown == [f"connecting to {one.url}"]
    [note] = check(one.url, held.url)
    assert note.startswith("warning: the other reward servers do the work")
    assert one.url not in note
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    [note] = check(held.url)
    assert note.startswith("warning: from this machine, which need not be the one that scores")
    assert notes_on(loads(rl_yaml(task))) == []
    held.close()


# --- a model as judge -------------------------------------------------------------------------------------------------


def judged(task: Path, name: str, there: FakeServer, **sections: str) -> list[dict]:
    """A run whose judge gives 0 to 10 for the sevens of an answer, each worth 1; the verdicts in its file."""
    (task / "rubric.txt").write_text("{prompt} {answer}")
    judge = {"rubric": f"{task}/rubric.txt", "url": there.judge_url, "model": "big", "weight": 10, "name": "sevens"}
    start(loads(rl_yaml(task, name=name, reward=f"{{judge: {judge}, max_failed_fraction: 0.5}}", **sections)))
    return read_lines(task / "runs" / name / "judge.jsonl")


def counts_sevens(message: dict) -> dict:
    _, _, answer = message["messages"][0]["content"].partition(" ")
    return written(f"Score: {answer.count('7')}")


@pytest.mark.long
def test_a_run_learns_the_same_from_a_judge_as_from_a_function(task, server):
    run(task, "function")
    there = server(lambda number, message: counts_sevens(message))
    verdicts = judged(task, "judged", there)
    assert same(weights(task, "judged"), weights(task, "function"))
    asked = [message["messages"][0]["content"] for message in there.messages]
    assert len(asked) == len(set(asked)) == len(verdicts)  # the same answer to the same prompt is judged once
    for step in read_lines(task / "runs" / "judged" / "metrics.jsonl")[-2:]:
        assert step["reward"] == pytest.approx(10 * step["extra/sevens"])


def test_a_judge_without_a_verdict_fails_its_samples_alone(task, server):
    first: list[str] = []

    def respond(number, message):
        prompt = message["messages"][0]["content"].partition(" ")[0]
        first.append(prompt)
        return written("No idea.") if prompt == first[0] else counts_sevens(message)

    # Evaluations have graders of their own: the judge does not see them.
    evaluation = f"{{path: {task}/prompts.jsonl, graders: [{{kind: regex, pattern: '^', weight: 0.5}}]}}"
    judged(task, "mute", server(respond), eval=evaluation)
    assert len(failed(task, "mute")) == 1
    reasons = {entry.reason for entry in read_ledger(task / "runs" / "mute") if entry.state == "failed"}
    assert all(reason.startswith("grader sevens: the judge wrote no verdict") for reason in reasons)
    evaluations = [line for line in read_lines(task / "runs" / "mute" / "metrics.jsonl") if "eval/reward" in line]
    assert [line["eval/reward"] for line in evaluations] == [0.5, 0.5]
    samples = {key for entry in read_ledger(task / "runs" / "mute") for key in entry.keys}
    assert len(first) <= len(samples)  # which are those to learn from


def test_a_function_is_added_to_what_a_server_gives(task, server):
    (task / "parts.py").write_text("def longer(queries, prompts, labels):\n    return [len(q) for q in queries]\n")
    one = server()
    records = run(task, "both", one, functions=[{"function": f"{task}/parts.py:longer", "weight": 0.5}])
    step = records[1]
    assert step["reward"] == pytest.approx(step["extra/function"] + 0.5 * step["extra/longer"], abs=1e-5)
