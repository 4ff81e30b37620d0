"""Commands of scripts, cut to a small machine: sizes become smaller, placeholders become files, nothing else changes.

Models and data sets keep their names: a command runs in a folder that has small ones at these relative paths. Flags
that a script leaves to the reader ("... other args") are in `LEFT_OUT`.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command_files import COMMANDS

from hotseat.openrlhf import flags

ROOT = Path(__file__).parents[2]
PATHS = {path.stem: path for path in COMMANDS}

# The largest value of each size. What a script leaves at a larger default is given.
LIMITS = {
    "--rollout_batch_size": 4,
    "--n_samples_per_prompt": 2,
    "--train_batch_size": 4,
    "--micro_rollout_batch_size": 2,
    "--micro_train_batch_size": 2,
    "--max_samples": 8,
    "--prompt_max_len": 64,
    "--generate_max_len": 16,
    "--max_len": 128,
    "--save_steps": 1,
}
# Folders of other people's machines, which become the folder that the command runs in.
FOLDERS = ("/openrlhf", "/path/to")

PROMPTS = "--prompt_data OpenRLHF/prompt-collection-v0.1 --input_key context_messages --apply_chat_template"
REWARD = "--reward_pretrain OpenRLHF/Llama-3-8b-rm-700k"
# Without these a command is refused, with us as with OpenRLHF.
LEFT_OUT = {
    "agent_math": "--vllm_num_engines 1",
    "async_minimal": f"--vllm_num_engines 1 --pretrain OpenRLHF/Llama-3-8b-sft-mixture {PROMPTS}"
    " --advantage_estimator reinforce",
    "grpo": f"{PROMPTS} --n_samples_per_prompt 4",
    "ppo_70b_hybrid": PROMPTS,
    "ppo_70b_separate": f"{PROMPTS} {REWARD}",
    "ppo_eight_nodes": PROMPTS,
    "ppo_four_nodes": PROMPTS,
    "ppo_hybrid_pipeline": PROMPTS,
    "ppo_hybrid_quick_start": PROMPTS,
    "ppo_two_nodes_colocated": f"--pretrain OpenRLHF/Llama-3-8b-sft-mixture {REWARD} {PROMPTS}",
    "reward_function_conversation": "--input_key text",
}


@dataclass(frozen=True)
class Cut:
    """A command that fits a machine of `nodes` nodes with `devices` devices for each role."""

    name: str
    words: list[str]  # of the whole command, with its launcher
    start: int  # index of the module's name
    exports: dict[str, str]
    sizes: dict[str, tuple[str, str]] = field(default_factory=dict)  # flag -> before (or its default), after
    added: list[str] = field(default_factory=list)

    @property
    def argv(self) -> list[str]:
        return self.words[self.start + 1 :]

    @property
    def script(self) -> str:
        lines = [f"export {name}={value}" for name, value in self.exports.items()]
        return "\n".join([*lines, shlex.join(self.words)])


def read_words(path: Path) -> tuple[list[str], dict[str, str]]:
    """Return the words of a command, with its launcher and without comments, and the variables that it exports."""
    exports, words = {}, []
    for line in path.read_text().splitlines():
        line = line.rstrip().removesuffix("\\")
        if exported := re.match(r"\s*export (\w+)=(.*)", line):
            exports[exported[1]] = exported[2]
        else:
            words += shlex.split(line, comments=True)
    return words, exports


def cut(
    name: str,
    folder: Path,
    *,
    nodes: int = 1,
    devices: int = 1,
    max_samples: int = LIMITS["--max_samples"],
    package: str = "hotseat.cli",
) -> Cut:
    """Return a command as it runs in `folder`. package: the one of its module."""
    words, exports = read_words(PATHS[name])
    words = [_moved(word, folder) for word in words]
    start = next(index for index, word in enumerate(words) if word.startswith("openrlhf.cli."))
    command = words[start].removeprefix("openrlhf.cli.")
    words[start] = f"{package}.{command}"
    added = LEFT_OUT.get(name, "").split()
    words += added
    limits = LIMITS | _device_limits(nodes, devices) | {"--max_samples": max_samples}
    sizes = {}
    for flag in flags.COMMANDS[command]:
        if flag.name not in limits:
            continue
        limit = limits[flag.name]
        place = next((at for at, word in enumerate(words) if at > start and word == flag.name), None)
        before = flag.default if place is None else int(words[place + 1])
        if before is None or before <= limit:
            continue
        sizes[flag.name] = (str(before) if place else f"{before}, its default", str(limit))
        if place is None:
            words += [flag.name, str(limit)]
        else:
            words[place + 1] = str(limit)
    return Cut(name, words, start, exports, sizes, added)


def _device_limits(nodes: int, devices: int) -> dict[str, int]:
    limits = {"--vllm_num_engines": nodes * devices, "--vllm_tensor_parallel_size": 1}
    for role in ("actor", "critic", "ref", "reward"):
        limits |= {f"--{role}_num_nodes": nodes, f"--{role}_num_gpus_per_node": devices}
    return limits


def _moved(word: str, folder: Path) -> str:
    for other in FOLDERS:
        word = re.sub(rf'(^|"){other}(?=[/"]|$)', rf"\g<1>{folder}", word)
    return word


# --- what commands name: models, data sets, files ---------------------------------------------------------------------

NUM_ROWS = 16
EXAMPLES = {
    "agent_func_math.py": "agents/try_again.py",
    "agent_func.py": "agents/try_again.py",
    "agent.py": "agents/try_again.py",
    "reward_func_math.py": "rewards/reward_func_math.py",
    "reward_func_code_gen.py": "rewards/reward_func_code_gen.py",
    "reward_func_conversation.py": "rewards/reward_func_conversation.py",
}


def rows_of(data_set: str) -> list[dict[str, Any]]:
    """Return rows with the columns that a data set has, or with those that its command names."""
    sums = [(a, b) for a in range(4) for b in range(4)][:NUM_ROWS]
    return [_ROWS[data_set](a, b) for a, b in sums]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


_ROWS = {
    "OpenRLHF/prompt-collection-v0.1": lambda a, b: {
        "dataset": "sums",
        "context": f"{a}+{b}=",
        "context_messages": [_user(f"{a}+{b}=")],
        "id": f"{a}-{b}",
    },
    "OpenRLHF/preference_dataset_mixture2_and_safe_pku": lambda a, b: {
        "chosen": [_user(f"{a}+{b}="), _assistant(str(a + b))],
        "rejected": [_user(f"{a}+{b}="), _assistant(f"{a + b + 1}, I think")],
        "chosen_score": 1.0,
        "rejected_score": 0.0,
        "source": "sums",
    },
    "Open-Orca/OpenOrca": lambda a, b: {
        "id": f"{a}.{b}",
        "system_prompt": "",
        "question": f"What is {a}+{b}?",
        "response": f"{a + b}.",
    },
    "gsm8k": lambda a, b: {"input": f"{a} apples and {b} apples?", "answers": f"So #### {a + b}"},
    "code-generation-dataset": lambda a, b: {
        "input": f"Print {a}+{b}.",
        "test_cases": json.dumps([{"input": "", "output": str(a + b)}]),
    },
    "OpenAssistant/oasst1": lambda a, b: {
        "message_id": f"{a}-{b}",
        "text": f"Is {a} more than {b}?",
        "role": "prompter",
    },
}


def make_materials(made: Cut, folder: Path) -> None:
    """Write what a command names into the folder that it runs in."""
    given = dict(zip(made.argv, made.argv[1:], strict=False))
    for flag in ("--pretrain", "--reward_pretrain"):
        if flag in given:
            make_model(folder / given[flag], is_reward=flag == "--reward_pretrain")
    for flag in ("--dataset", "--prompt_data"):
        if flag in given:
            write_rows(folder / given[flag] / "train.jsonl", rows_of(given[flag]))
    for flag in ("--agent_func_path", "--remote_rm_url"):
        if flag in given:
            path = folder / given[flag]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text((ROOT / "examples" / EXAMPLES[path.name]).read_text())
            if path.name == "reward_func_conversation.py":
                make = [
                    sys.executable,
                    ROOT / "examples" / "rewards" / "make_classifier.py",
                    path.parent / "classifier",
                ]
                subprocess.run(make, check=True, capture_output=True, timeout=600)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_model(path: Path, *, is_reward: bool = False) -> None:
    """Write an untrained model of 100,000 parameters that reads any text, or a reward model of that kind."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    from hotseat.cli.starter_task import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(path)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    torch.manual_seed(0)
    if is_reward:
        config.num_labels, config.mean, config.std = 1, 0.0, 1.0
        LlamaForSequenceClassification(config).save_pretrained(path)
    else:
        LlamaForCausalLM(config).save_pretrained(path)
