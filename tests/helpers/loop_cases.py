"""A task small enough for tests: files of a model with two layers, and groups made by hand."""

import atexit
import functools
import json
import random
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from hotseat.types import Episode, Prompt, PromptGroup, SampleKey, ScoredEpisode, Segment


def make_segment(context: int, sampled: int, start: int = 1) -> Segment:
    length = context + sampled
    mask = torch.arange(length) >= context
    return Segment(
        token_ids=torch.arange(start, start + length),
        mask=mask,
        log_probs=torch.where(mask, -1.0, 0.0),
        versions=torch.where(mask, 0, -1).to(torch.int32),
    )


def make_group(prompt: int, rewards: list[float], sampled: int = 2, truncated: bool = False) -> PromptGroup:
    samples = tuple(
        ScoredEpisode(
            Episode(SampleKey(0, prompt, index), (make_segment(3, sampled),), "q", is_truncated=truncated),
            reward,
            reward,
        )
        for index, reward in enumerate(rewards)
    )
    return PromptGroup(Prompt(prompt, "q", (1, 2, 3)), samples)


REWARD = """
def reward_func(queries, prompts, labels):
    return [float(query[len(prompt):].count("7")) for query, prompt in zip(queries, prompts)]
"""


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def more_sevens(num_pairs: int, seed: int) -> list[dict]:
    """Two answers each; the better one has more sevens."""
    rng, rows = random.Random(seed), []
    while len(rows) < num_pairs:
        answers = ["".join(rng.choice("1777") for _ in range(rng.randint(2, 6))) for _ in range(2)]
        worse, better = sorted(answers, key=lambda answer: answer.count("7"))
        if worse.count("7") < better.count("7"):
            rows.append({"prompt": f"{rng.randrange(100)}+1=", "chosen": better, "rejected": worse, "margin": 0.5})
    return rows


def make_task(directory: Path, seed: int = 0, architecture: str = "Llama", **shape: float) -> Path:
    """A tiny model over digits, prompts `1+2=` with a digit as label, a reward that counts sevens, and pairs.

    Each is made once per process of tests; every caller gets a copy of its own.
    shape: of the model, where it is to have another.
    """
    shutil.copytree(_made_task(seed, architecture, **shape), directory, dirs_exist_ok=True)
    return directory


@functools.cache
def _made_task(seed: int, architecture: str, **shape: float) -> Path:
    import transformers

    from hotseat.demo import make_model

    held = tempfile.TemporaryDirectory(prefix="task-")
    atexit.register(held.cleanup)
    directory = Path(held.name)
    make_model(directory / "demo", seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "demo")
    tokenizer.save_pretrained(directory / "model")
    torch.manual_seed(seed)
    getattr(transformers, f"{architecture}ForCausalLM")(
        getattr(transformers, f"{architecture}Config")(
            **{
                "vocab_size": 16,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": 32,
                **shape,
            },
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    ).save_pretrained(directory / "model")
    rows = [{"input": f"{a}+{a + 1}=", "label": str(a)} for a in range(1, 9)]
    write_rows(directory / "prompts.jsonl", rows)
    write_rows(directory / "examples.jsonl", [{"input": row["input"], "output": row["label"] * 3} for row in rows])
    write_rows(directory / "pairs.jsonl", more_sevens(256, seed=0))
    write_rows(directory / "held_out_pairs.jsonl", more_sevens(100, seed=1))
    (directory / "reward.py").write_text(REWARD)
    return directory


def as_yaml(sections: Mapping[str, str]) -> str:
    """Return a config of sections in YAML; an empty one is left out."""
    return "\n".join(f"{key}: {value}" for key, value in sections.items() if value)


def _config(directory: Path, task: str, own: dict[str, str], changes: dict[str, str]) -> str:
    """Return a config of a task that trains the model in a folder."""
    sections = {
        "task": task,
        "name": task or "run",
        "run_dir": f"{directory}/runs",
        "cluster": "{runtime: local}",
        "actor": f"{{model: {directory}/model, optimizer: {{learning_rate: 1e-2, schedule: constant}}}}",
    }
    return as_yaml(sections | own | changes)


def rl_yaml(directory: Path, **changes: str) -> str:
    sections = {
        "data": f"{{path: {directory}/prompts.jsonl, label_key: label, max_length: 16}}",
        "reward": f"{{function: {directory}/reward.py}}",
        "rollout": "{batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4, num_slots: 8}",
        "train": "{dtype: fp32, batch_size: 16, micro_batch_size: 8}",
        "seed": "3",
    }
    return _config(directory, "", sections, changes)


def sft_yaml(directory: Path, **changes: str) -> str:
    sections = {
        "data": f"{{path: {directory}/examples.jsonl, output_key: output, max_length: 16}}",
        "eval": f"{{path: {directory}/examples.jsonl}}",
        "train": "{dtype: fp32, batch_size: 4, micro_batch_size: 2, max_epochs: 4}",
    }
    return _config(directory, "sft", sections, changes)


def rm_yaml(directory: Path, **changes: str) -> str:
    return _config(directory, "rm", _pairs(directory), changes)


def dpo_yaml(directory: Path, **changes: str) -> str:
    return _config(directory, "dpo", _pairs(directory), changes)


def _pairs(directory: Path) -> dict[str, str]:
    return {
        "data": f"{{path: {directory}/pairs.jsonl, prompt_key: prompt, max_length: 16}}",
        "eval": f"{{path: {directory}/held_out_pairs.jsonl}}",
        "train": "{dtype: fp32, batch_size: 32, micro_batch_size: 16}",
    }


def weights(task: Path, name: str = "run") -> dict[str, torch.Tensor]:
    """Weights of the model that a run of the task exported."""
    return load_file(task / "runs" / name / "model" / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Tell whether two models have the same weights, bit for bit."""
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def make_value_model(directory: Path, seed: int = 1, **config: float) -> Path:
    """A reward model over the task's digits. config: of its config.json, where it is to have more."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory.parent / "model")
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    made = transformers.LlamaConfig.from_pretrained(directory.parent / "model", num_labels=1)
    for name, value in config.items():
        setattr(made, name, value)
    model = transformers.LlamaForSequenceClassification(made)
    with torch.no_grad():
        model.score.weight.mul_(20)  # as made, its numbers are near 0
    model.save_pretrained(directory)
    return directory


def ppo_yaml(directory: Path, **changes: str) -> str:
    """With every role: two optimizer steps of two passes, a reference with an adaptive KL, a critic."""
    sections = {
        "algorithm": "{estimator: gae, gae_lambda: 0.9, kl: {coef: 0.1, target: 0.5}}",
        "critic": "{optimizer: {learning_rate: 1e-2, schedule: constant}}",
        "train": "{dtype: fp32, batch_size: 8, micro_batch_size: 4, max_epochs: 2, num_episodes: 2}",
    } | changes
    return rl_yaml(directory, **sections)
