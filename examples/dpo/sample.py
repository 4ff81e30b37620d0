"""Pairs for DPO, sampled from a model and judged by the task's reward; or the share of sums that a model gets right.

    python examples/dpo/sample.py pairs build/dpo/sft/model build/dpo
    python examples/dpo/sample.py score build/dpo/sft/model build/dpo

A pair is one right and one wrong answer of the model's own to the same sum: sums whose samples are all right, or all
wrong, have none. `chosen.jsonl` has the right answers of the pairs alone, for SFT.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 4096  # sequences at a time
MAX_NEW_TOKENS = 4  # three digits and the end
MAX_PAIRS = 2  # of a sum


def sample(model_path: Path, prompts: list[str], count: int, seed: int, temperature: float) -> list[list[str]]:
    """Sample `count` answers to each prompt; all prompts have the same length. Temperature 0 is greedy."""
    generator = torch.Generator().manual_seed(seed)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_path), AutoTokenizer.from_pretrained(model_path)
    answers: list[list[str]] = []
    step = max(1, BATCH // count)
    for first in range(0, len(prompts), step):
        token_ids = tokenizer(prompts[first : first + step], return_tensors="pt").input_ids
        with torch.inference_mode():
            outputs = model(token_ids, use_cache=True)
            # The prompt is computed once for all its samples.
            cache, logits = outputs.past_key_values, outputs.logits[:, -1].repeat_interleave(count, dim=0)
            cache.batch_repeat_interleave(count)
            made = []
            for _ in range(MAX_NEW_TOKENS):
                if made:
                    logits = model(made[-1], past_key_values=cache, use_cache=True).logits[:, -1]
                made.append(_next_tokens(logits, temperature, generator))
        texts = [text.partition("<eos>")[0] for text in tokenizer.batch_decode(torch.cat(made, dim=1))]
        answers += [texts[at : at + count] for at in range(0, len(texts), count)]
    return answers


def _next_tokens(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Choose the next token of each sequence: [num_sequences, vocabulary] to [num_sequences, 1]."""
    if not temperature:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)


def judged(files: Path, rows: list[dict[str, str]], answers: list[list[str]]) -> list[list[bool]]:
    """Tell of each answer whether the task's reward function calls it right."""
    reward_func = runpy.run_path(str(files / "reward.py"))["reward_func"]
    verdicts = []
    for row, texts in zip(rows, answers, strict=True):
        prompts, labels = [row["input"]] * len(texts), [row["label"]] * len(texts)
        verdicts.append([reward == 1 for reward in reward_func([row["input"] + t for t in texts], prompts, labels)])
    return verdicts


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_pairs(model: Path, files: Path, num_prompts: int, count: int, seed: int) -> None:
    """Write `pairs.jsonl` and `chosen.jsonl`."""
    rng, rows = random.Random(seed), read(files / "prompts.jsonl")[:num_prompts]
    answers = sample(model, [row["input"] for row in rows], count, seed, temperature=1.0)
    pairs = []
    for row, texts, verdicts in zip(rows, answers, judged(files, rows, answers), strict=True):
        right = [text for text, is_right in zip(texts, verdicts, strict=True) if is_right]
        wrong = sorted({text for text, is_right in zip(texts, verdicts, strict=True) if text and not is_right})
        if right:
            for rejected in rng.sample(wrong, min(MAX_PAIRS, len(wrong))):
                pairs.append({"prompt": row["input"], "chosen": right[0], "rejected": rejected})
    rng.shuffle(pairs)
    write(files / "pairs.jsonl", pairs)
    write(files / "chosen.jsonl", [{"input": pair["prompt"], "output": pair["chosen"]} for pair in pairs])
    num_sums = len({pair["prompt"] for pair in pairs})
    sampled = f"out of {len(rows)} with {count} samples each"
    print(f"{files / 'pairs.jsonl'}: {len(pairs)} pairs of {num_sums} sums, {sampled}")


def score(model: Path, files: Path) -> float:
    """Print and return the share of held-out sums that the model's likeliest answer gets right."""
    rows = read(files / "held_out.jsonl")
    verdicts = judged(files, rows, sample(model, [row["input"] for row in rows], 1, 0, temperature=0.0))
    share = sum(verdict for [verdict] in verdicts) / len(verdicts)
    sampled = judged(files, rows, sample(model, [row["input"] for row in rows], 16, 0, temperature=1.0))
    of_samples = sum(map(sum, sampled)) / (16 * len(sampled))
    print(f"{model}: {share:.1%} of {len(rows)} held-out sums right; of samples at temperature 1, {of_samples:.1%}")
    return share


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pairs", "score"])
    parser.add_argument("model", type=Path)
    parser.add_argument("files", type=Path)
    parser.add_argument("--prompts", type=int, default=4000, help="sums to sample from")
    parser.add_argument("--count", type=int, default=8, help="samples of each sum")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.what == "score":
        score(options.model, options.files)
    else:
        make_pairs(options.model, options.files, options.prompts, options.count, options.seed)


if __name__ == "__main__":
    main(sys.argv[1:])
