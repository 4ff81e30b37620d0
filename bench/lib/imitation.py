"""A policy for the table-top to begin reinforcement with: it sees, and seldom succeeds.

It imitates the script of the simulator first, then a mixture of the script's decisions and random ones, with as many
random ones as it takes. A plain loop beside the simulator on one device: nothing is written but the policy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

SEED = 2_000_000  # the first of seeds that no run learns from or is evaluated on
EVAL_SEED = 3_000_000


@dataclass(frozen=True)
class Views:
    """Views of the simulator, and what the script did there."""

    frames: Tensor  # [n, H, W, 3] uint8
    tasks: Tensor  # [n] int64
    decisions: Tensor  # [n, 2 * chunk] int64: bins
    places: Tensor  # [n, 8] float32, of finger, pucks and disc, within about 1

    def to(self, device: torch.device) -> Views:
        return Views(*(each.to(device) for each in (self.frames, self.tasks, self.decisions, self.places)))


def collect(worlds: Any, num_tasks: int, num_views: int, chunk: int, bins: int, seed: int) -> Views:
    """Play the script. Its actions are those of the middles of bins, as the policy's are.

    Episodes leave its path: every third decision is carried out at random, and is not one to imitate.
    """
    random = np.random.default_rng(seed)
    everywhere = list(range(worlds.num_worlds))
    tasks = [at % num_tasks for at in everywhere]
    begun: list[Any] = []
    kept: list[int] = []
    decisions: list[list[int]] = []
    next_seed = SEED + 100_000 * seed
    while len(kept) < num_views:
        seen = worlds.reset(everywhere, tasks, [next_seed + at for at in everywhere])
        next_seed += worlds.num_worlds
        views = list(seen)
        acting = everywhere
        while acting and len(kept) < num_views:
            before = list(views)
            is_script = dict(zip(acting, random.random(len(acting)) < 2 / 3, strict=True))
            taken: dict[int, list[int]] = {at: [] for at in acting}
            for _ in range(chunk):
                if not acting:
                    break
                advice = np.clip(np.floor((worlds.expert(acting) + 1) / 2 * bins), 0, bins - 1)
                chosen = np.array([is_script[at] for at in acting])[:, None]
                indexes = np.where(chosen, advice, random.integers(bins, size=advice.shape)).astype(int)
                for at, index in zip(acting, indexes, strict=True):
                    taken[at] += index.tolist()
                acting = _step(worlds, acting, indexes[:, None], bins, views)
            for at, bins_taken in taken.items():
                if is_script[at]:
                    missing = chunk - len(bins_taken) // 2  # after the end: never carried out
                    begun.append(before[at])
                    kept.append(tasks[at])
                    decisions.append(bins_taken + bins_taken[-2:] * missing)
    frames, places = (
        torch.from_numpy(np.stack(each)) for each in zip(*((v.image, v.state) for v in begun), strict=True)
    )
    return Views(frames, torch.tensor(kept), torch.tensor(decisions), places / 0.25)


def _step(worlds: Any, acting: list[int], indexes: np.ndarray, bins: int, views: list[Any]) -> list[int]:
    """Carry out bins, [n, K, 2], and put what is seen then into `views`; return the worlds whose episodes go on."""
    going = []
    for at, step in zip(acting, worlds.step(acting, (indexes + 0.5) / bins * 2 - 1), strict=True):
        if isinstance(step, Exception):
            raise step
        views[at] = step.seen
        if not (step.terminated or step.truncated):
            going.append(at)
    return going


class Imitator:
    """A policy, and what it needs to act: prompts as tokens, bins as tokens."""

    def __init__(self, folder: Path, instructions: Sequence[str], chunk: int, bins: int, device: torch.device):
        from transformers import AutoProcessor, LlavaForConditionalGeneration

        self.model = LlavaForConditionalGeneration.from_pretrained(folder).to(device)
        processor = AutoProcessor.from_pretrained(folder)
        image = [processor.tokenizer.convert_tokens_to_ids(processor.image_token)] * self.model.config.image_seq_length
        prompts = [[*image, *processor.tokenizer(words)["input_ids"]] for words in instructions]
        # Besides what to do it learns where things are.
        self.places = nn.Linear(self.model.config.text_config.hidden_size, 8).to(device)
        self._num_sampled, self._bins, self._device = 2 * chunk, bins, device
        self._length = max(map(len, prompts)) + self._num_sampled
        self._prompts = torch.zeros(len(prompts), self._length, dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            self._prompts[row, : len(prompt)] = torch.tensor(prompt)
        self._lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._last = len(processor.tokenizer) - 1  # the token of bin 0

    def logits(self, frames: Tensor, tasks: Tensor, decisions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute logits of the tokens of decisions, given those before them: [n, 2 * chunk, vocab].

        Also returns the last hidden state of the prompt's last token, [n, hidden]. Prompts of different lengths are
        padded at the end, where no token looks.
        """
        tokens = self._prompts[tasks].clone()
        places = self._lengths[tasks][:, None] + torch.arange(self._num_sampled, device=self._device)
        tokens.scatter_(1, places, self._last - decisions)
        pixels = (frames.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        hidden = self.model.model(input_ids=tokens, pixel_values=pixels, use_cache=False).last_hidden_state
        chosen = hidden.gather(1, (places - 1)[..., None].expand(-1, -1, hidden.shape[-1]))
        return self.model.lm_head(chosen).float(), chosen[:, 0]

    def loss(self, frames: Tensor, tasks: Tensor, decisions: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of decisions, and that of places read off the prompt's last token."""
        logits, hidden = self.logits(frames, tasks, decisions)
        loss = functional.cross_entropy(logits.flatten(0, 1), (self._last - decisions).flatten())
        return loss, functional.mse_loss(self.places(hidden), places)

    @torch.no_grad()
    def sample(self, frames: Tensor, tasks: Tensor, temperature: float) -> Tensor:
        """Sample decisions: [n, 2 * chunk] bins; what is no bin counts as the last one."""
        decisions = torch.zeros(len(tasks), self._num_sampled, dtype=torch.int64, device=self._device)
        for at in range(self._num_sampled):
            logits = self.logits(frames, tasks, decisions)[0][:, at] / temperature
            tokens = torch.multinomial(logits.softmax(-1), 1)[:, 0]
            decisions[:, at] = (self._last - tokens).clamp(0, self._bins - 1)
        return decisions

    def success(self, worlds: Any, num_tasks: int, temperature: float) -> list[float]:
        """Play an episode in every world; return how many of each task succeed."""
        everywhere = list(range(worlds.num_worlds))
        tasks = [at % num_tasks for at in everywhere]
        seen = worlds.reset(everywhere, tasks, [EVAL_SEED + at for at in everywhere])
        views = [each.image for each in seen]
        acting, succeeded = everywhere, np.zeros(len(everywhere))
        while acting:
            frames = torch.from_numpy(np.stack([views[at] for at in acting])).to(self._device)
            decisions = self.sample(frames, torch.tensor([tasks[at] for at in acting]).to(self._device), temperature)
            actions = (decisions.reshape(len(acting), -1, 2).cpu().numpy() + 0.5) / self._bins * 2 - 1
            going = []
            for at, step in zip(acting, worlds.step(acting, actions), strict=True):
                if isinstance(step, Exception):
                    raise step
                views[at] = step.seen.image
                if step.terminated or step.truncated:
                    succeeded[at] = bool(step.success)
                else:
                    going.append(at)
            acting = going
        return [float(succeeded[task::num_tasks].mean()) for task in range(num_tasks)]


@dataclass(frozen=True)
class ImitationSettings:
    """Sizes of the imitation. limit_s: of its first part."""

    num_views: int
    batch_size: int
    limit_s: float
    num_steps: int = 200  # between two looks at its success
    learning_rate: float = 1e-3
    enough: float = 0.95  # success of the script's imitation, at a temperature of 0.5, that ends the first part
    begin: tuple[float, float] = (0.06, 0.14)  # success of either kind of tasks that the second part leads to
    shares: tuple[float, float] = (0.01, 0.3)  # of the script's decisions in the first mixture, to reach and to push
    max_mixtures: int = 8  # that it tries


def imitate(
    folder: Path,
    tasks: Sequence[str],
    worlds: Any,
    chunk: int,
    bins: int,
    settings: ImitationSettings,
    say: Callable[..., None],
) -> None:
    """Train the policy in `folder`, first on the script's decisions, then on a mixture with random ones."""
    from hotseat.envs.families.mujoco_warp import INSTRUCTIONS

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    imitator = Imitator(folder, [INSTRUCTIONS[task] for task in tasks], chunk, bins, device)
    began_s = time.perf_counter()
    views = collect(worlds, len(tasks), settings.num_views, chunk, bins, seed=0).to(device)
    say(f"{len(views.tasks)} views of the script, {len(views.tasks) / (time.perf_counter() - began_s):,.0f}/s")
    is_push = torch.tensor([task.startswith("push") for task in tasks], device=device)
    weights = [*imitator.model.parameters(), *imitator.places.parameters()]
    optimizer = torch.optim.AdamW(weights, weight_decay=0.0)

    def learn(num_steps: int, rate: float, shares: tuple[float, float]) -> list[float]:
        """Take steps on batches in which these shares of the decisions, to reach and to push, are the script's."""
        share_of = torch.where(is_push, shares[1], shares[0])
        for group in optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros(2, device=device)
        for _ in range(num_steps):
            chosen = torch.randint(len(views.tasks), (settings.batch_size,), device=device)
            of, decisions = views.tasks[chosen], views.decisions[chosen]
            is_random = torch.rand(len(chosen), device=device) >= share_of[of]
            decisions = torch.where(is_random[:, None], _random_like(decisions, bins), decisions)
            losses = torch.stack(imitator.loss(views.frames[chosen], of, decisions, views.places[chosen]))
            optimizer.zero_grad(set_to_none=True)
            losses.sum().backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            total += losses.detach()
        return [each / num_steps for each in total.tolist()]

    rate, num_steps = settings.learning_rate, 0
    while time.perf_counter() - began_s < settings.limit_s:
        losses = learn(settings.num_steps, rate, (1.0, 1.0))
        num_steps += settings.num_steps
        success = imitator.success(worlds, len(tasks), 0.5)
        say(
            f"{time.perf_counter() - began_s:5.0f} s  {num_steps:5} steps  loss {losses[0]:.3f}, of places"
            f" {losses[1]:.3f}  success at 0.5: {' '.join(f'{each:.0%}' for each in success)}"
        )
        rate = max(rate * 0.93, 1e-4)
        if np.mean(success) >= settings.enough:
            break
    shares = [*settings.shares]
    kinds = [
        [at for at, task in enumerate(tasks) if task.startswith("push") == is_pushed] for is_pushed in (False, True)
    ]
    for _ in range(settings.max_mixtures):
        learn(settings.num_steps, 5e-4, (shares[0], shares[1]))
        success = imitator.success(worlds, len(tasks), 1.0)
        say(
            f"{time.perf_counter() - began_s:5.0f} s  script's shares {shares[0]:.3f}, {shares[1]:.3f}  success at 1:"
            f" {' '.join(f'{each:.0%}' for each in success)}, mean {np.mean(success):.1%}"
        )
        means = [float(np.mean([success[at] for at in kind])) if kind else None for kind in kinds]
        factors = [_factor(mean, settings.begin) for mean in means]
        if factors == [1.0, 1.0]:
            break
        shares = [min(0.9, share * factor) for share, factor in zip(shares, factors, strict=True)]
    imitator.model.save_pretrained(folder)


def _random_like(decisions: Tensor, bins: int) -> Tensor:
    """Draw bins, those in the middle more often, as the mean of two draws: fewer decisions in a row lead anywhere."""
    return (torch.randint_like(decisions, bins) + torch.randint_like(decisions, bins + 1)) // 2


def _factor(mean: float | None, begin: tuple[float, float]) -> float:
    """Return by what to multiply the script's share of a kind of tasks that succeed so often."""
    if mean is None or begin[0] <= mean <= begin[1]:
        return 1.0
    if mean > begin[1]:
        return 0.6 if mean > 2 * begin[1] else 0.8
    return 1.6 if mean < begin[0] / 2 else 1.25
