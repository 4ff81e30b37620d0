"""Run directories in the documented format, made of nothing but a random generator."""

import json
import math
import random
import re
from pathlib import Path

CONFIG = """task: rl
name: {name}
seed: {seed}
actor:
  model: models/llama-small
  optimizer:
    learning_rate: {learning_rate}
rollout:
  batch_size: 32
  samples_per_prompt: 8
algorithm:
  advantage: group_norm
data:
  path: prompts.jsonl
"""
PHASES = {"rollout": 4.1, "prepare": 0.9, "update": 3.2, "sync": 0.5}
HOLDER = {"rollout": "rollout", "prepare": "actor", "update": "actor", "sync": "actor"}
ATTACK = '</script><img src=x onerror="window.attacked=1"><!--<script>'
SOURCES = ("gsm8k", "math", "code")
TEXT = (
    "the sum of a and b is carried over to next column so we get answer therefore first add units then tens"
    " each box holds seven apples and there are nine boxes which makes sixty three in all"
)
WORDS = TEXT.split()


def make_run(
    path: Path, *, num_steps=60, seed=0, learning_rate=1e-3, samples_every=5, num_tokens=90, attack="", has_agent=False
):
    """All files of a reinforcement run. `attack` is put wherever a run has text."""
    path.mkdir(parents=True)
    chance = random.Random(seed)
    (path / "config.yaml").write_text(CONFIG.format(name=path.name, seed=seed, learning_rate=learning_rate))
    (path / "plan.json").write_text(json.dumps(plan()))
    write_lines(path / "metrics.jsonl", metrics(chance, num_steps))
    write_lines(path / "distributions.jsonl", distributions(chance, num_steps))
    steps = [1, *range(samples_every, num_steps + 1, samples_every)]
    samples = [sample(chance, step, index, num_tokens, attack) for step in steps for index in range(6)]
    if has_agent:
        samples = [conversation(chance, step, index) for step in steps for index in range(2)]
    write_lines(path / "samples.jsonl", samples)
    write_lines(path / "ledger.jsonl", ledger(num_steps))
    write_lines(path / "events.jsonl", events(num_steps, attack))
    write_lines(path / "machine.jsonl", machine(num_steps))
    lines = ",\n".join(json.dumps(event) for event in timeline(chance, num_steps))
    (path / "timeline.json").write_text(f"[\n{lines},\n")
    return path


def write_lines(path: Path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def machine(num_steps):
    for number in range(4 * num_steps):
        shares = {"machine/cpu": 0.3, "machine/device 0/busy": 0.9 if number % 4 else 0.1, "machine/device 1/busy": 0.5}
        gib = {"machine/memory": 12.0, "machine/device 0/memory": 60.0 + number % 4, "machine/device 1/memory": 40.0}
        yield {"time": 1.8e9 + 2.0 * number, "step": number // 4, "over_s": 2.0} | shares | gib


def progress(step: int, num_steps: int) -> float:
    return 1 - math.exp(-4 * step / num_steps)


def metrics(chance, num_steps):
    for step in range(num_steps + 1):
        done = progress(step, num_steps)
        evaluation = {
            "eval/accuracy": 0.31 + 0.62 * done + chance.gauss(0, 0.008),
            "eval/reward": 0.33 + 0.6 * done + chance.gauss(0, 0.008),
            "eval/length": 62 + 30 * done,
        }
        if step == 0:
            yield {"step": 0} | evaluation
            continue
        times = {f"time/{phase}": seconds * chance.uniform(0.9, 1.2) for phase, seconds in PHASES.items()}
        record = {
            "step": step,
            "reward": 0.3 + 0.6 * done + chance.gauss(0, 0.05),
            "reward_std": 0.4 - 0.2 * done,
            "loss": 0.02 * chance.gauss(0, 1),
            "grad_norm": 0.8 - 0.4 * done + abs(chance.gauss(0, 0.1)) + (2.5 if step % 37 == 0 else 0),
            "entropy": 1.9 - 1.2 * done + chance.gauss(0, 0.04),
            "kl": 0.08 * done + abs(chance.gauss(0, 0.005)),
            "length": 64 + 30 * done + chance.gauss(0, 4),
            "learning_rate": 1e-3 * (1 - step / num_steps),
            "engine_gap": 0.004 * math.exp(chance.gauss(0, 0.2)),
            "engine_gap_p99": 0.05 * math.exp(chance.gauss(0, 0.2)),
            "engine_gap_max": 0.4 * math.exp(chance.gauss(0, 0.4)),
            "tokens_per_s": 8200 + chance.gauss(0, 300),
            "samples": 256.0,
            "samples_failed": 1.0,
            "engine_restarts": 1.0 if step > num_steps // 2 else 0.0,
            "extra/format": 0.5 + 0.5 * done,
            "time/driver_cpu": 0.3,
            **times,
            "step_s": sum(times.values()) + 0.3,
        }
        for phase, role, gib in (
            ("rollout", "rollout", 46.2),
            ("rollout", "actor", 3.1),
            ("update", "actor", 38.4),
            ("update", "rollout", 1.9),
            ("sync", "actor", 9.0),
            ("sync", "rollout", 17.2),
        ):
            record[f"memory/{phase}/{role}"] = gib * chance.uniform(0.97, 1.03)
        if step % 10 == 0 or step == num_steps:
            record |= evaluation | {"time/evaluate": 2.2 * chance.uniform(0.9, 1.1)}
        if step == 7:
            record["kl"] = "nan"
        yield record


def distributions(chance, num_steps):
    num_gaps = 60 if num_steps < 1_000 else 8
    for step in range(1, num_steps + 1):
        right = round(256 * (0.3 + 0.6 * progress(step, num_steps)))
        lengths = {}
        for _ in range(256 if num_steps < 1_000 else 16):
            length = max(4, round(chance.gauss(64 + 30 * progress(step, num_steps), 14)))
            lengths[length] = lengths.get(length, 0) + 1
        gaps = [[0.004 * math.exp(chance.gauss(0, 1.2)), 4] for _ in range(num_gaps)]
        yield {
            "step": step,
            "reward": [[0.0, 256 - right], [1.0, right]],
            "length": sorted(lengths.items()),
            "engine_gap": sorted(gaps),
        }


def sample(chance, step, index, num_tokens, attack=""):
    state = ("trained", "trained", "trained", "dropped", "dropped", "failed")[index]
    reward = None if state == "failed" else float(chance.random() < 0.6)
    reasons = {"dropped": "every answer of the group was worth the same", "failed": "reward function timed out"}
    record = {
        "step": step,
        "epoch": 0,
        "prompt": 17 * step + index,
        "sample": index,
        "source": SOURCES[index % 3] + attack,
        "state": state,
        "reason": reasons.get(state, "") + attack,
        "reward": reward,
        "score": reward,
        "is_truncated": index == 2,
        "label": f"{step + index}{attack}",
        "prompt_text": f"Each of {step} boxes holds {index + 2} apples. How many apples are there in all?{attack}",
        "extra": {"format": 1.0},
        "waited_s": None,
        "took_s": None,
        "turns": [],
        "segments": [],
    }
    if state == "failed":
        return record
    text = ["<s>", "Each", " of", f" {step}", " boxes", "?", "\n"]
    text += [f" {chance.choice(WORDS)}" for _ in range(num_tokens)] + [attack, f" {step * (index + 2)}"]
    sampled = [position >= 7 for position in range(len(text))]
    engine = [-abs(chance.gauss(0, 0.7)) if is_sampled else None for is_sampled in sampled]
    advantage = None if state == "dropped" else (0.9 if reward else -1.1)
    record["segments"] = [
        {
            "text": text,
            "sampled": sampled,
            "engine_log_probs": engine,
            "trainer_log_probs": [
                None if value is None or state == "dropped" else value + chance.gauss(0, 0.02) for value in engine
            ],
            "advantages": [advantage if is_sampled else None for is_sampled in sampled],
            "fates": [
                chance.choices(("learned", "clipped", "corrected"), (20, 2, 1))[0]
                if is_sampled and state == "trained"
                else None
                for is_sampled in sampled
            ],
            "versions": [step - 1 + (position > 50) if value else None for position, value in enumerate(sampled)],
        }
    ]
    return record


PLAYED = [  # (what was read, what was said, reward, tool call)
    ("<|im_start|>user\nWhat is 17 * 23? Use the calculator.<|im_end|>\n<|im_start|>assistant\n",
     'I will multiply. <tool_call>{"name": "multiply", "arguments": {"a": 17, "b": 32}}</tool_call><|im_end|>',
     -0.1, 'multiply({"a": 17, "b": 32})'),
    ("\n<|im_start|>tool\n544<|im_end|>\n<|im_start|>assistant\n",
     'That was 32. Again: <tool_call>{"name": "multiply", "arguments": {"a": 17, "b": 23}}</tool_call><|im_end|>',
     0.0, 'multiply({"a": 17, "b": 23})'),
    ("\n<|im_start|>tool\n391<|im_end|>\n<|im_start|>assistant\n", "The answer is 391.<|im_end|>", 1.0, None),
]  # fmt: skip


def conversation(chance, step, index):
    """An episode of an agent: three turns with tools, and a branch that goes back after the first."""
    record = sample(chance, step, index, 4) | {"state": "trained", "reason": "", "reward": 0.9, "score": 0.9}
    turns, clock = [], 0.05

    def segment_of(parts, num_shared=0):
        nonlocal clock
        text, sampled = [], []
        for at, (read, said, reward, call) in enumerate(parts):
            is_shared = at < num_shared
            for words, is_said in ((read, False), (said, not is_shared)):
                pieces = re.findall(r"<[^>]*>|\s?\w+|\s|[^\w\s]", words)
                text += pieces
                sampled += [is_said] * len(pieces)
            if not is_shared:
                took = 0.4 + chance.random()
                calls = [call] if call else []
                times = {"asked_s": clock, "answered_s": clock + took}
                turns.append(
                    {"length": sampled[-len(pieces) :].count(True), "reward": reward, "tool_calls": calls} | times
                )
                clock += took + (1.3 * chance.random() if call else 0.01)
        return {
            "text": text,
            "sampled": sampled,
            "engine_log_probs": [-abs(chance.gauss(0, 0.7)) if value else None for value in sampled],
            "trainer_log_probs": [-abs(chance.gauss(0, 0.7)) if value else None for value in sampled],
            "advantages": [chance.choice((-0.4, 0.8)) if value else None for value in sampled],
            "fates": ["learned" if value else None for value in sampled],
            "versions": [step - 1 if value else None for value in sampled],
        }

    other = ("\n<|im_start|>user\nWithout tools, please.<|im_end|>\n<|im_start|>assistant\n", "About 400.", 0.0, None)
    segments = [segment_of(PLAYED), segment_of([PLAYED[0], other], 1)]
    return record | {"segments": segments, "turns": turns, "waited_s": 0.4, "took_s": clock + 0.2}


def ledger(num_steps):
    for step in range(1, num_steps + 1):
        common = {"epoch": 0, "prompt": step, "step": step, "version": step - 1}
        yield common | {"samples": list(range(7)), "state": "trained", "reason": ""}
        yield common | {"samples": [7], "state": "failed", "reason": "reward function timed out"}


def events(num_steps, attack=""):
    yield {"time": 1731654321.5, "step": 0, "kind": "note", "text": f"colocated: actor on 0-1, rollout on 0-1{attack}"}
    yield {"time": 1731654401.0, "step": 7, "kind": "warning", "text": "kl was not finite; the update was skipped"}
    yield {
        "time": 1731654521.0,
        "step": num_steps // 2 + 1,
        "kind": "fault",
        "text": "engine 1 died and is replaced (WorkerError: out of memory)",
    }


def timeline(chance, num_steps):
    """Two devices on which actor and rollout take turns."""
    names = {1: "phases", 2: "devices", 3: "actor", 4: "rollout"}
    threads = {(1, 0): "phases", (2, 0): "device 0", (2, 1): "device 1"}
    threads |= {(process, rank): f"{names[process]} {rank}" for process in (3, 4) for rank in (0, 1)}
    for process, name in names.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    for (process, thread), name in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
    now = 1731654321.5e6

    def span(process, thread, name, start, duration, **more):
        return {"ph": "X", "pid": process, "tid": thread, "name": name, "ts": start, "dur": duration} | more

    for step in range(1, num_steps + 1):
        turn = 0
        for phase, seconds in PHASES.items():
            duration = seconds * chance.uniform(0.9, 1.2) * 1e6
            role, turn = HOLDER[phase], turn + 1
            process = 4 if role == "rollout" else 3
            yield span(1, 0, phase, now, duration, args={"step": step})
            for device in (0, 1):
                yield span(2, device, role, now, duration, args={"turn": turn})
                if phase in ("rollout", "prepare"):
                    what = "offload actor optimizer" if phase == "rollout" else "offload rollout cache"
                    yield span(2, device, what, now, 0.25e6, cat="hand-over", args={"bytes": 11 << 30})
                begin = now + 0.3e6 * chance.random()
                call = {"rollout": "generate", "prepare": "log_probs", "sync": "begin_push"}.get(phase, phase)
                yield span(process, device, call, begin, (now + duration - begin) * chance.uniform(0.85, 1))
            now += duration + 0.05e6
        if step == num_steps // 2:
            now += 6e6


def plan():
    def group_step(name, roles, used):
        return {"step": name, "roles": roles, "used_gib": used, "holdings": [], "terms": [], "verdict": "fits"}

    aside = {"role": "rollout", "part": "kv_cache", "how": "dropped", "gib": 31.2}
    return {
        "label": "colocated",
        "verdict": "fits",
        "roles": [
            {"name": "actor", "on": "0-1", "processes": [{}, {}], "tensor_parallel": 1},
            {"name": "rollout", "on": "@actor", "processes": [{}, {}], "tensor_parallel": 1},
        ],
        "groups": [
            {
                "devices": [[0, 0], [0, 1]],
                "memory_gib": 80.0,
                "steps": [
                    group_step("rollout", ["rollout"], 54.3),
                    group_step("update", ["actor"], 47.9),
                    group_step("sync", ["actor", "rollout"], 31.0),
                ],
                "hand_overs": [{"from_step": "rollout", "to_step": "update", "leaves": [aside], "comes": []}],
            }
        ],
        "warnings": ["actor: the model's shape is assumed to be that of Llama-3-8B, from its name"],
    }
