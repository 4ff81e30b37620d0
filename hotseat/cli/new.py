"""`hotseat new`: writes the files of a first run, ready to be run and to be changed."""

from __future__ import annotations

import argparse
import filecmp
import itertools
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotseat.errors import UserError

MODEL = "tiny_model"

HEAD = """\
task: {task}
actor:
  model: {model}
  optimizer: {{learning_rate: {rate}}}{rate_note}"""

RL = """\
# GRPO: the answers to one prompt are compared with each other by their rewards.
{head}
data: {{path: prompts.jsonl, label_key: label, apply_chat_template: true, max_length: {length}}}
reward: {{function: reward.py}}
rollout: {{batch_size: 16, samples_per_prompt: 8, max_new_tokens: {answer}}}  # 16 prompts a step, 8 answers to each
train: {{batch_size: 128, num_episodes: 8}}  # an optimizer step for all 16 x 8 samples; 8 passes over the prompts
eval: {{path: held_out.jsonl, every: 8}}  # accuracy on prompts that are never trained on
"""

PPO = """\
# PPO: a critic learns what an answer will be worth, and a KL penalty holds the policy near the model it began as.
{head}
critic: {{optimizer: {{learning_rate: {critic_rate}}}}}  # begins as the actor's model (critic.model)
algorithm: {{estimator: gae, kl: {{coef: 0.01}}}}
data: {{path: prompts.jsonl, label_key: label, apply_chat_template: true, max_length: {length}}}
reward: {{function: reward.py}}
rollout: {{batch_size: 64, max_new_tokens: {answer}}}  # 64 prompts a step, an answer to each
train: {{batch_size: 64, num_episodes: 24}}  # an optimizer step for all 64 samples; 24 passes over the prompts
eval: {{path: held_out.jsonl, every: 8}}  # accuracy on prompts that are never trained on
"""

SFT = """\
# Supervised fine-tuning: learn to give the answers of the examples.
{head}
data: {{path: chats.jsonl, input_key: messages, apply_chat_template: true, max_length: {length}}}
train: {{batch_size: 16, max_epochs: 8}}  # 16 examples in a step; 8 passes over them
eval: {{path: held_out_chats.jsonl, every: 8}}  # loss on conversations that are never trained on
"""

RM = """\
# A reward model: learn to give the better of two answers the higher number.
{head}
data: {{path: pairs.jsonl, prompt_key: prompt, apply_chat_template: true, max_length: {length}}}
train: {{batch_size: 16, max_epochs: 20}}  # 16 pairs in a step; 20 passes over them
eval: {{path: held_out_pairs.jsonl, every: 8}}  # accuracy: share of pairs in which the chosen answer is above the other
"""

DPO = """\
# DPO: raise the better of two answers above the other, relative to the model that the policy began as.
{head}
data: {{path: pairs.jsonl, prompt_key: prompt, apply_chat_template: true, max_length: {length}}}
algorithm: {{dpo: {{beta: 0.1}}}}
train: {{batch_size: 16, max_epochs: 4}}  # 16 pairs in a step; 4 passes over them
eval: {{path: held_out_pairs.jsonl, every: 8}}  # accuracy: share of pairs in which the chosen answer is above the other
"""

REWARD = '''\
"""The reward of an answer: 1 for the right word alone, 0.2 for the right word among others, else 0."""

import re


def reward_func(queries, prompts, labels):
    """Return a number for each answer. A query is a prompt with its answer; a label is what the data's row has."""
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        answer = query[len(prompt) :].split("<")[0]  # without the token that ends it, such as <|end|>
        words = re.findall("[a-z]+", answer.lower())
        rewards.append(1.0 if words == [label] else 0.2 if label in words else 0.0)
    return rewards
'''

TINY = {"rate": "2e-3", "critic_rate": "5e-3", "length": "64", "answer": "8"}
PRETRAINED = {"critic_rate": "9e-6", "length": "1024", "answer": "256"}


@dataclass(frozen=True)
class Kind:
    """A kind of run that `hotseat new` writes the files of."""

    task: str
    config: str
    data: Mapping[str, str]  # file -> how its rows are made: a function of hotseat.cli.starter_task
    rate: str  # usual learning rate of a pretrained model
    has_reward: bool = False


_PROMPTS = {"prompts.jsonl": "prompts", "held_out.jsonl": "prompts"}
KINDS = {
    "rl": Kind("rl", RL, _PROMPTS, "1e-6", has_reward=True),
    "ppo": Kind("rl", PPO, _PROMPTS, "1e-6", has_reward=True),
    "sft": Kind("sft", SFT, {"chats.jsonl": "chats", "held_out_chats.jsonl": "chats"}, "5e-6"),
    "rm": Kind("rm", RM, {"pairs.jsonl": "pairs", "held_out_pairs.jsonl": "pairs"}, "9e-6"),
    "dpo": Kind("dpo", DPO, {"pairs.jsonl": "pairs", "held_out_pairs.jsonl": "pairs"}, "5e-7"),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "kind",
        choices=list(KINDS),
        metavar="KIND",
        help="rl (GRPO with a reward function), ppo (the same with a critic), sft (chats), rm or dpo (pairs)",
    )
    command.add_argument("directory", nargs="?", default=".", metavar="DIR", help="where the files go (default: here)")
    command.add_argument(
        "--model", metavar="MODEL", help="checkpoint folder or hub name to train instead of a tiny model made here"
    )


def run_new(arguments: argparse.Namespace) -> int:
    """Write the files, print what to do with them, and return the exit code."""
    directory = Path(arguments.directory)
    names = write_files(arguments.kind, directory, arguments.model)
    paths = (Path("runs", f"{KINDS[arguments.kind].task}-{number}") for number in itertools.count(1))
    run = next(path for path in paths if not (directory / path).exists())  # of the next run without a name
    print(f"{directory}: {', '.join(names)}")
    print("\nnext:")
    if directory.resolve() != Path.cwd():
        print(f"  cd {directory}")
    print(f"  hotseat run {arguments.kind}.yaml")
    print(f"  hotseat report {run}    # the page {run}/report.html: curves, times, samples token by token")
    return 0


def texts(kind: str, model: str | None = None) -> dict[str, str]:
    """Return the name and content of every file except the model's."""
    from hotseat.cli import starter_task

    chosen = KINDS[kind]
    if model is None:
        note = f"  # for the tiny model; a pretrained one wants about {chosen.rate}"
        here = f"{MODEL}  # made for this folder; a checkpoint folder or a hub name goes here"
        values = {**TINY, "model": here}
    else:
        note = ""
        values = {**PRETRAINED, "model": _as_yaml(model), "rate": chosen.rate}
    head = HEAD.format(task=chosen.task, rate_note=note, **values)
    files = {f"{kind}.yaml": chosen.config.format(head=head, **values)}
    if chosen.has_reward:
        files["reward.py"] = REWARD
    for name, asked in zip(chosen.data, starter_task.questions(), strict=True):
        files[name] = getattr(starter_task, chosen.data[name])(asked)
    return files


def write_files(kind: str, directory: Path, model: str | None = None) -> list[str]:
    """Write the files of a kind, and a tiny model unless `model` names one. Returns their names.

    Nothing is overwritten. Data, reward and model that another kind has written here are shared. Any other file of the
    same name is an error, before anything is written.
    """
    files = texts(kind, model)
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file: give a folder")
    here = {name: directory / name for name in files if (directory / name).exists()}
    taken = [name for name, path in here.items() if not path.is_file() or path.read_bytes() != files[name].encode()]
    if (directory / f"{kind}.yaml").exists():
        taken = list(dict.fromkeys([f"{kind}.yaml", *taken]))
    _refuse(directory, taken)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if model is None:
            _make_model(directory)
        for name, text in files.items():
            if not (directory / name).exists():
                (directory / name).write_text(text)
    except OSError as error:
        raise UserError(
            f"{error.filename or directory} cannot be written: {error.strerror}; give another folder"
        ) from None
    return [*files, *([f"{MODEL}/"] if model is None else [])]


def _as_yaml(text: str) -> str:
    """Quote a text that YAML would not read as it stands."""
    import json

    import yaml

    try:
        return text if yaml.safe_load(f"key: {text}") == {"key": text} else json.dumps(text)
    except yaml.YAMLError:
        return json.dumps(text)


def _make_model(directory: Path) -> None:
    """Make the tiny model, unless the folder has one: a model with the same tokenizer counts as such."""
    from hotseat.cli.starter_task import make_model, make_tokenizer

    path = directory / MODEL
    with tempfile.TemporaryDirectory() as folder:
        if not path.exists():
            print("making a tiny model, which takes some seconds", flush=True)
            make_model(Path(folder))
            shutil.copytree(folder, path)
            return
        make_tokenizer().save_pretrained(folder)
        names = sorted(file.name for file in Path(folder).iterdir())
        if not path.is_dir() or filecmp.cmpfiles(path, folder, names, shallow=False)[0] != names:
            _refuse(directory, [MODEL])


def _refuse(directory: Path, taken: Sequence[str]) -> None:
    if taken:
        names = ", ".join(str(directory / name) for name in taken)
        raise UserError(
            f"nothing was written, because this is here already: {names}; give another folder, or remove it"
        )
