"""Agents that use a client against native ones: seconds and CPU time of 256 episodes of four turns.

A tiny model by the transformers engine, in this process; every kind of agent plays the same episodes on it: four
answers, with one character between them. The kinds take turns, several times around, so that all meet the same other
work of the machine. CPU time is that of all processes, the engine's included. The first time around does not count: it
starts processes and imports.

    python bench/agent_clients.py [--rounds 5] [--python .agent-envs/libraries/bin/python] [--only native play]

The interpreter of `--python` must have the package openai, as Hotseat's own must.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from hotseat.agents import AgentHost, OpenRequests
from hotseat.config import Config, loads
from hotseat.demo import make_model
from hotseat.loop.inputs import load_tokenizer
from hotseat.loop.settings.rollout_settings import engine_settings, host_settings, rollout_sampling
from hotseat.loop.workers.engine_worker import make_engine
from hotseat.loop.workers.host_settings import make_agent
from hotseat.rollout.engine import Engine
from hotseat.types import Failed, Prompt, SampleKey, Sampling, ScoredEpisode

NUM_EPISODES, NUM_TURNS, LENGTH = 256, 4, 12
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"

NATIVE = """
from hotseat import Environment, Step


class Talks(Environment):
    def reset(self, prompt, label):
        self.num_turns = 0

    def step(self, action):
        self.num_turns += 1
        return Step("+", reward=float(action.count("7")), done=self.num_turns == TURNS)
"""

PLAY = """
import openai


async def play(prompt, client):
    messages, reward = [{"role": "user", "content": prompt.text}], 0.0
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_keyMORE) as policy:
        for _ in range(TURNS):
            reply = await policy.chat.completions.create(model=client.model, messages=messages)
            reward += reply.choices[0].message.content.count("7")
            messages += [reply.choices[0].message, {"role": "user", "content": "+"}]
    return reward
"""
WITHOUT_CERTIFICATES = ", http_client=openai.DefaultAsyncHttpxClient(verify=False)"

COMMAND = """
import json, os, sys, urllib.request

task = json.loads(sys.stdin.readline())
messages, reward = [{"role": "user", "content": task["prompt"]}], 0.0
for _ in range(TURNS):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "x", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    reward += message["content"].count("7")
    messages += [message, {"role": "user", "content": "+"}]
json.dump({"reward": reward}, open(os.environ["HOTSEAT_RESULT"], "w"))
"""

OPENAI_COMMAND = """
import json, os, sys
import openai

task = json.loads(sys.stdin.readline())
messages, reward = [{"role": "user", "content": task["prompt"]}], 0.0
policy = openai.OpenAI()
for _ in range(TURNS):
    reply = policy.chat.completions.create(model="x", messages=messages)
    reward += reply.choices[0].message.content.count("7")
    messages += [reply.choices[0].message, {"role": "user", "content": "+"}]
json.dump({"reward": reward}, open(os.environ["HOTSEAT_RESULT"], "w"))
"""


@dataclass(frozen=True)
class Case:
    """A kind of agent. text: of its file. target: the most times native that it should take; None: it has none."""

    title: str
    text: str
    target: float | None = None
    agent: Mapping[str, Any] = field(default_factory=dict)  # options beside its file


def cases(python: str) -> dict[str, Case]:
    quick = PLAY.replace("MORE", WITHOUT_CERTIFICATES)
    usual = PLAY.replace("MORE", "")
    return {
        "native": Case("native: an Environment", NATIVE),
        "play": Case("play with the openai client", usual, 2),
        "play-verify-off": Case("play, client without certificates", quick, 2),
        "python": Case("play in agent.python", usual, 2, {"python": python}),
        "command": Case("a command, urllib", COMMAND, None, {"command": [sys.executable]}),
        "command-openai": Case("a command, openai client", OPENAI_COMMAND, None, {"command": [sys.executable]}),
        "preload": Case("a command, urllib in agent.preload", COMMAND, 4, of_modules("json", "urllib.request")),
        "preload-openai": Case("a command, openai in agent.preload", OPENAI_COMMAND, 4, of_modules("json", "openai")),
    }


def of_modules(*names: str) -> dict[str, Any]:
    return {"command": [sys.executable], "preload": list(names)}


def config_of(directory: Path, name: str, case: Case) -> Config:
    """Return the config of a run with an agent, whose file it writes."""
    file = directory / f"{name}.py"
    file.write_text(case.text.replace("TURNS", str(NUM_TURNS)))
    agent = {**case.agent, "max_concurrent": NUM_EPISODES}
    if "command" in agent:
        agent["command"] = [*case.agent["command"], str(file)]
    else:
        agent["path"] = str(file)
    data = {"path": "none.jsonl", "label_key": "label", "max_length": 96, "chat_template": TEMPLATE}
    rollout = {"batch_size": 32, "samples_per_prompt": 8, "max_new_tokens": LENGTH, "num_slots": 64}
    config = {
        "name": name,
        "run_dir": str(directory),
        "cluster": {"runtime": "local", "inventory": "1x2", "component_placement": {"actor": 0, "rollout": 1}},
        "actor": {"model": str(directory / "model")},
        "data": data,
        "agent": agent,
        "rollout": rollout,
        "train": {"dtype": "fp32"},
    }
    return loads(json.dumps(config))


Measured = tuple[float, float, int, int]  # seconds, CPU time, sampled tokens, failed episodes


def play(host: AgentHost, tokenizer: Any, sampling: Sampling, epoch: int) -> Measured:
    """Play all episodes, and return what it took."""
    texts = [f"{at // 8}+1=" for at in range(NUM_EPISODES)]
    samples = [
        (Prompt(at, text, tuple(tokenizer(text)["input_ids"])), SampleKey(epoch, at // 8, at % 8))
        for at, text in enumerate(texts)
    ]
    began_s, spent_s = time.perf_counter(), cpu_s()
    futures = host.submit_many(samples, sampling)
    outcomes = [future.result(600.0) for future in futures]
    took_s, spent_s = time.perf_counter() - began_s, cpu_s() - spent_s
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    if failed:
        print(f"{len(failed)} episodes failed, such as: {failed[0].reason}", file=sys.stderr)
    played = [outcome.episode for outcome in outcomes if isinstance(outcome, ScoredEpisode)]
    assert all(len(episode.turn_lengths) == NUM_TURNS for episode in played)
    return took_s, spent_s, sum(episode.num_sampled for episode in played), len(failed)


def adopt_orphans() -> None:
    """Have processes whose parents have ended become children of this one, so that their CPU time is not lost."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def cpu_s() -> float:
    """Return the CPU time of this process and of all it has started, also of what has ended."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", default=".agent-envs/libraries/bin/python")
    parser.add_argument("--only", nargs="+", choices=cases(""), default=list(cases("")))
    arguments = parser.parse_args()
    adopt_orphans()
    all_cases = cases(os.path.abspath(arguments.python))
    chosen = {name: all_cases[name] for name in arguments.only}
    with tempfile.TemporaryDirectory() as name:
        measured = measure(Path(name), chosen, arguments.rounds)
    show(chosen, measured, arguments.rounds)


def measure(directory: Path, chosen: Mapping[str, Case], num_rounds: int) -> dict[str, list[Measured]]:
    """Return what `play` measured of each kind in every round."""
    make_model(directory / "model", 0)
    file = directory / "model" / "config.json"
    file.write_text(file.read_text().replace('"max_position_embeddings": 32', '"max_position_embeddings": 128'))
    configs = {name: config_of(directory, name, case) for name, case in chosen.items()}
    first = next(iter(configs.values()))
    tokenizer = load_tokenizer(first)
    engine: Engine = make_engine(engine_settings(first, (tokenizer.eos_token_id,), directory), 0)
    hosts = {
        name: AgentHost(
            make_agent(host_settings(config, None), tokenizer),
            engine.submit,
            run_seed=0,
            max_concurrent=NUM_EPISODES,
            requests=OpenRequests(engine.abort),
        )
        for name, config in configs.items()
    }
    measured: dict[str, list[Measured]] = {name: [] for name in chosen}
    try:
        for at in range(num_rounds + 1):
            for name, host in hosts.items():
                seconds = play(host, tokenizer, rollout_sampling(configs[name]), at)
                shown = f"{seconds[0]:.2f} s, {seconds[1]:.2f} s of CPU time"
                print(f"{'warm-up' if at == 0 else f'round {at}'}: {name}: {shown}", file=sys.stderr, flush=True)
                if at > 0:
                    measured[name].append(seconds)
    finally:
        for host in hosts.values():
            host.close()
        engine.close()
    return measured


def show(chosen: Mapping[str, Case], measured: Mapping[str, list[Measured]], num_rounds: int) -> None:
    """Print the medians as a table."""
    medians = {name: [statistics.median(each) for each in zip(*rows, strict=True)] for name, rows in measured.items()}
    native = medians.get("native")
    table = Table(title=f"{NUM_EPISODES} episodes of {NUM_TURNS} turns: medians of {num_rounds} rounds")
    for column in ("", "seconds", "times native", "target", "CPU s", "times native", "sampled tokens", "failed"):
        table.add_column(column, justify="right")
    for name, (took_s, spent_s, num_tokens, num_failed) in medians.items():
        case, is_compared = chosen[name], native is not None and name != "native"
        table.add_row(
            case.title,
            f"{took_s:.2f}",
            f"{took_s / native[0]:.1f}" if native and is_compared else "",
            "" if case.target is None else f"{case.target:g}",
            f"{spent_s:.1f}",
            f"{spent_s / native[1]:.1f}" if native and is_compared else "",
            f"{num_tokens:,.0f}",
            f"{num_failed:.0f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
