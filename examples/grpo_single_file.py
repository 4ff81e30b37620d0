"""GRPO on two-digit sums in one file: every step of the algorithm, none of the machinery.

    python examples/grpo_single_file.py            about two minutes on two cores

It is the demo's task (`hotseat demo`) written out with torch and transformers alone: SFT on examples most of which
forget the carry, then GRPO, which compares eight answers to each sum. Unlike Hotseat it has one process, one sequence
length, no engine and no checkpoints, to show only the algorithm.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

# --- the task ---------------------------------------------------------------------------------------------------------

PAD, EOS = 0, 1
ID_OF = {character: index + 2 for index, character in enumerate("0123456789+=")}
CHARACTER_OF = {index: character for character, index in ID_OF.items()}
PROMPT_LENGTH = 6  # "12+34="
MAX_NEW_TOKENS = 5  # three digits, the end, and one to spare
CARELESS = 0.75  # share of examples that forget the carry


def encode(text: str) -> list[int]:
    return [ID_OF[character] for character in text]


def question(a: int, b: int) -> str:
    return f"{a:02d}+{b:02d}="


def answer(a: int, b: int) -> str:
    return f"{a + b:03d}"


def careless_answer(a: int, b: int) -> str:
    """Return the sum of each column alone, without any carry."""
    return f"0{(a // 10 + b // 10) % 10}{(a + b) % 10}"


@dataclass(frozen=True)
class Task:
    """Sums to learn from, and sums that are never seen in training."""

    train: list[tuple[int, int]]
    held_out: list[tuple[int, int]]

    @classmethod
    def make(cls, seed: int, num_held_out: int = 200) -> Task:
        sums = [(a, b) for a in range(100) for b in range(100)]
        random.Random(seed).shuffle(sums)
        return cls(sums[num_held_out:], sums[:num_held_out])


def rewards_of(tokens: Tensor, sums: list[tuple[int, int]]) -> Tensor:
    """[num_samples]: 1 for the right sum and nothing else, 0 otherwise."""
    rewards = []
    for row, (a, b) in zip(tokens[:, PROMPT_LENGTH:].tolist(), sums, strict=True):
        text = "".join(CHARACTER_OF.get(token, "?") for token in row[: row.index(EOS)]) if EOS in row else None
        rewards.append(1.0 if text == answer(a, b) else 0.0)
    return torch.tensor(rewards)


# --- the model --------------------------------------------------------------------------------------------------------


def make_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            initializer_range=0.06,  # the usual 0.02 is for wide models: narrow ones start to learn late with it
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )


def log_probs_of(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """[num_samples, num_new]: log π of each token after the prompt, given what precedes it."""
    logits = model(input_ids=tokens).logits[:, PROMPT_LENGTH - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, PROMPT_LENGTH:, None])[..., 0]


@torch.no_grad()
def generate(model: LlamaForCausalLM, prompts: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """[num_samples, PROMPT_LENGTH + num_new]: prompts and answers, PAD after the end."""
    tokens, cache, step_input = prompts, None, prompts
    is_done = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(MAX_NEW_TOKENS):
        output = model(input_ids=step_input, past_key_values=cache, use_cache=True)
        logits, cache = output.logits[:, -1].float(), output.past_key_values
        if temperature == 0:
            sampled = logits.argmax(-1)
        else:
            sampled = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        sampled = torch.where(is_done, PAD, sampled)
        tokens = torch.cat([tokens, sampled[:, None]], dim=1)
        is_done |= sampled == EOS
        if is_done.all():
            break
        step_input = sampled[:, None]
    return tokens


def sampled_mask(tokens: Tensor) -> Tensor:
    """[num_samples, num_new]: 1 up to and with the end of the answer, 0 for the padding behind it."""
    is_end = (tokens[:, PROMPT_LENGTH:] == EOS).int()
    return (is_end.cumsum(dim=1) - is_end == 0).float()


def prompts_of(sums: Iterable[tuple[int, int]]) -> Tensor:
    return torch.tensor([encode(question(a, b)) for a, b in sums])


def exact_match(model: LlamaForCausalLM, sums: list[tuple[int, int]]) -> float:
    """Share of sums that the likeliest answer gets right."""
    tokens = generate(model, prompts_of(sums), 0.0, torch.Generator())
    return float(rewards_of(tokens, sums).mean())


# --- optimisation -----------------------------------------------------------------------------------------------------


class Optimizer:
    """AdamW with warm-up, a linear decay to a share of the peak, and clipping by the global norm."""

    def __init__(self, model: LlamaForCausalLM, peak: float, num_steps: int, warmup: float, min_ratio: float):
        self._model = model
        self._adam = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.0)
        self._peak, self._num_steps, self._min_ratio = peak, num_steps, min_ratio
        self._num_warmup = -int(-num_steps * warmup // 1)
        self._step = 0

    def learning_rate(self) -> float:
        if self._step < self._num_warmup:
            return self._peak * (self._step + 1) / (self._num_warmup + 1)
        done = min(1.0, (self._step - self._num_warmup) / (self._num_steps - self._num_warmup))
        return self._peak * (1 - (1 - self._min_ratio) * done)

    def step(self, loss: Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for group in self._adam.param_groups:
            group["lr"] = self.learning_rate()
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self._step += 1


# --- learning from examples -------------------------------------------------------------------------------------------


def learn_from_examples(model: LlamaForCausalLM, task: Task, seed: int, num_steps: int, batch_size: int = 64) -> None:
    """Train by cross-entropy on the examples, most of which forget the carry."""
    rng = random.Random(seed + 1)
    optimizer = Optimizer(model, peak=1e-3, num_steps=num_steps, warmup=0.05, min_ratio=0.05)
    for _ in range(num_steps):
        rows = []
        for a, b in rng.choices(task.train, k=batch_size):
            text = careless_answer(a, b) if rng.random() < CARELESS else answer(a, b)
            rows.append([*encode(question(a, b) + text), EOS])
        optimizer.step(-log_probs_of(model, torch.tensor(rows)).mean())


# --- learning from rewards --------------------------------------------------------------------------------------------


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """GRPO: (reward − mean of its group) / (standard deviation of its group + 1e-9). [num_samples] in and out."""
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-9)).view(-1)


def clipped_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, eps: float = 0.2
) -> Tensor:
    """PPO's clipped surrogate, averaged over all sampled tokens of the optimizer step."""
    ratio = (log_probs - old_log_probs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    return -(gain * mask).sum() / mask.sum()


def learn_from_rewards(
    model: LlamaForCausalLM,
    task: Task,
    seed: int,
    num_steps: int,
    report: Callable[[int, float], None],
    num_prompts: int = 64,
    group_size: int = 8,
    num_updates: int = 1,
) -> None:
    """GRPO: sample, score, compare within the group, and take `num_updates` steps on parts of the rollout."""
    rng, generator = random.Random(seed + 2), torch.Generator().manual_seed(seed)
    optimizer = Optimizer(model, peak=2e-4, num_steps=num_steps * num_updates, warmup=0.05, min_ratio=0.1)
    order: list[tuple[int, int]] = []
    for step in range(1, num_steps + 1):
        while len(order) < num_prompts:
            order += rng.sample(task.train, len(task.train))
        chosen, order = order[:num_prompts], order[num_prompts:]
        sums = [each for each in chosen for _ in range(group_size)]

        tokens = generate(model, prompts_of(sums), 1.0, generator)
        rewards = rewards_of(tokens, sums)
        advantages = group_advantages(rewards, group_size)
        mask = sampled_mask(tokens)
        with torch.no_grad():
            old_log_probs = log_probs_of(model, tokens)

        size = len(sums) // num_updates
        for first in range(0, len(sums), size):
            part = slice(first, first + size)
            log_probs = log_probs_of(model, tokens[part])
            optimizer.step(clipped_loss(log_probs, old_log_probs[part], advantages[part, None], mask[part]))
        report(step, float(rewards.mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-steps", type=int, default=400)
    parser.add_argument("--grpo-steps", type=int, default=80)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    started_s = time.monotonic()
    task, model = Task.make(arguments.seed), make_model(arguments.seed)
    learn_from_examples(model, task, arguments.seed, arguments.sft_steps)
    before = exact_match(model, task.held_out)
    print(f"after the examples: held-out exact match {before:.1%} ({time.monotonic() - started_s:.0f} s)", flush=True)

    def report(step: int, reward: float) -> None:
        if step % 10 == 0:
            print(f"step {step}: reward {reward:.3f} ({time.monotonic() - started_s:.0f} s)", flush=True)

    learn_from_rewards(model, task, arguments.seed, arguments.grpo_steps, report)
    print(f"after reinforcement: held-out exact match {exact_match(model, task.held_out):.1%}")


if __name__ == "__main__":
    main()
