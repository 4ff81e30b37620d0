"""Whole runs in which programs play the episodes, through the gateway."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from environments import own_environment
from loop_cases import rl_yaml
from transformers import AutoTokenizer

from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.loop.run import start
from hotseat.loop.workers.spool import Spool
from hotseat.observe import read_lines
from hotseat.types import Segment

pytestmark = pytest.mark.slow

# Answers end with a token, as in any chat; the second branch of the game begins at the first answer.
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"

SMALL = ["rollout.samples_per_prompt=2", "train.batch_size=8"]

PLAY = """
import json
import openai

async def play(prompt, client):
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as policy:
        async def ask(messages):
            reply = await policy.chat.completions.create(
                model=client.model, messages=messages, extra_body={"return_token_ids": True}
            )
            with open(SEEN, "a") as file:
                file.write(json.dumps([reply.prompt_token_ids, reply.choices[0].token_ids]) + "\\n")
            return reply.choices[0].message
        async def read(messages):
            stream = await policy.chat.completions.create(
                model=client.model, messages=messages, stream=True, extra_body={"return_token_ids": True}
            )
            chunks = [chunk async for chunk in stream]
            with open(SEEN, "a") as file:
                file.write(json.dumps([chunks[0].prompt_token_ids, chunks[-1].choices[0].token_ids]) + "\\n")
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        first = [{"role": "user", "content": prompt.text}]
        first.append(await ask(first))
        second = await ask([*first, {"role": "user", "content": "+"}])
        other = await read([*first, {"role": "user", "content": "="}])
    return float((second.content + other).count("7"))
"""

PROGRAM = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "x", "messages": [{"role": "user", "content": task["prompt"]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
json.load(urllib.request.urlopen(request))
if task["prompt"] == "3+4=":
    sys.exit("cannot play this")
json.dump({"reward": None}, open(os.environ["HOTSEAT_RESULT"], "w"))
"""


def config_of(task: Path, agent: str, **changes: str) -> str:
    data = {"path": f"{task}/prompts.jsonl", "label_key": "label", "max_length": 24, "chat_template": TEMPLATE}
    fixed = {"log": "{keep_rollouts: true}", "agent": agent, "data": json.dumps(data)}
    return rl_yaml(task, **{**fixed, **changes})


def answers_of(segments: tuple[Segment, ...], lengths: tuple[int, ...]) -> Counter:
    """The learned answers of an episode, each with the tokens before it."""
    counted: Counter = Counter()
    left = list(lengths)
    for segment in segments:
        tokens, mask, at = segment.token_ids.tolist(), segment.mask.tolist(), 0
        while True in mask[at:]:
            at = mask.index(True, at)
            end = at + left.pop(0)
            counted[tuple(tokens[:at]), tuple(tokens[at:end])] += 1
            at = end
    return counted


def learned_answers(task: Path) -> tuple[Counter, int]:
    """All answers that a run learned from, as its groups were trained, and the number of segments they are in."""
    learned: Counter = Counter()
    num_segments = 0
    for prompt in range(8):
        finished = Spool(task / "runs" / "run" / "rollouts").get((0, prompt))
        assert finished is not None
        assert not finished.failures
        for sample in finished.group.samples:
            episode = sample.episode
            num_segments += len(episode.segments)
            learned += answers_of(episode.segments, episode.turn_lengths)
    return learned, num_segments


def sampled_answers(seen: Path) -> Counter:
    """All answers that the engine sampled, as the program got their token ids."""
    return Counter((tuple(context), tuple(ids)) for context, ids in map(json.loads, seen.read_text().splitlines()))


def check_what_was_learned(task: Path, seen: Path) -> None:
    learned, num_segments = learned_answers(task)
    assert learned == sampled_answers(seen)
    assert sum(learned.values()) == 8 * 2 * 3
    assert num_segments == 8 * 2 * 2  # the game has two branches
    records = read_lines(task / "runs" / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    assert all(record["engine_gap"] < 1e-5 for record in records[1:])  # the trainer's log-probs of the same tokens


def test_an_openai_client_plays_a_game_with_branches_and_the_policy_learns_every_token_once(task):
    seen = task / "seen.jsonl"
    (task / "agent.py").write_text(PLAY.replace("SEEN", repr(str(seen))))
    start(loads(config_of(task, f"{{path: {task}/agent.py}}", reward=""), SMALL))
    check_what_was_learned(task, seen)


def test_a_command_plays_and_the_reward_function_scores_what_it_played(task):
    (task / "program.py").write_text(PROGRAM)
    agent = f"{{command: [{sys.executable}, {task}/program.py]}}"
    start(loads(config_of(task, agent), [*SMALL, "reward.max_failed_fraction=1.0"]))
    spool = Spool(task / "runs" / "run" / "rollouts")
    for prompt in range(8):
        finished = spool.get((0, prompt))
        assert finished is not None
        if prompt == 2:
            assert [reason.rpartition(": sample ")[2] for _, reason in finished.failures] == [
                f"0/2/{sample}: the program ended with exit code 1: cannot play this" for sample in range(2)
            ]
            continue
        for sample in finished.group.samples:
            assert sample.reward == sample.episode.query.partition("=")[2].count("7")


@pytest.mark.long
def test_play_shows_one_episode_as_a_run_samples_it(task, capsys, monkeypatch):
    monkeypatch.chdir(task)
    seen = task / "seen.jsonl"
    (task / "agent.py").write_text(PLAY.replace("SEEN", repr(str(seen))))
    (task / "run.yaml").write_text(config_of(task, f"{{path: {task}/agent.py}}", reward=""))
    assert main(["play", "run.yaml", "--prompt", "2"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:4] == ["prompt 2, label '3'", "3+4=", "request 1, a new context: 4 new tokens", "3+4="]
    assert sum(line.startswith(("request 2, after answer 1: ", "request 3, after answer 1: ")) for line in shown) == 2
    (first, _, _) = map(json.loads, seen.read_text().splitlines())
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    assert shown[4].startswith(f"answer 1: {len(first[1])} tokens, ended by ")
    assert shown[5] == tokenizer.decode(first[1])
    assert re.fullmatch(r"\d+ sampled tokens in 2 segments", shown[-3])
    assert [line.split()[0] for line in shown[-2:]] == ["reward", "score"]

    assert main(["play", "run.yaml", "--prompt", "8"]) == 2
    assert "--prompt 8: there are 8 prompts, numbered from 0" in capsys.readouterr().err
    (task / "agent.py").write_text("def play(prompt, client):\n    raise ValueError('no luck')\n")
    assert main(["play", "run.yaml"]) == 1
    assert "failed: " in (out := capsys.readouterr().out)
    assert "the agent raised ValueError: no luck" in out


def test_play_refuses_what_has_no_episodes(task, capsys):
    (task / "sft.yaml").write_text("task: sft\n")
    assert main(["play", str(task / "sft.yaml")]) == 2
    assert "sft.yaml: task sft has no episodes to play; this is for rl" in capsys.readouterr().err
    (task / "rl.yaml").write_text("task: rl\n")
    assert main(["play", str(task / "rl.yaml")]) == 2
    assert "rl.yaml: actor.model and data.path must be set" in capsys.readouterr().err


def run_on_ray(task: Path, *overrides: str) -> Path:
    seen = task / "seen.jsonl"
    (task / "agent.py").write_text(PLAY.replace("SEEN", repr(str(seen))))
    cluster = "{runtime: ray, component_placement: {actor: 0, rollout: 1}}"
    text = config_of(task, f"{{path: {task}/agent.py}}", reward="", cluster=cluster)
    (task / "run.yaml").write_text(text)
    command = [sys.executable, "-m", "hotseat.cli.main", "run", str(task / "run.yaml"), *SMALL, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=860, env=own_environment())
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return seen


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_on_ray_an_openai_client_plays_a_game_with_branches(task):
    check_what_was_learned(task, run_on_ray(task))


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_an_openai_client_plays_while_the_policy_learns(task):
    """Rollout runs ahead, and weights change in the middle of episodes."""
    seen = run_on_ray(task, "overlap.staleness=1", "overlap.order=arrival", "overlap.in_flight=keep")
    learned, num_segments = learned_answers(task)
    assert num_segments == 8 * 2 * 2
    assert sum(learned.values()) == 8 * 2 * 3
    assert learned <= sampled_answers(seen)
