"""A policy for the table-top to begin reinforcement with: it sees, and seldom succeeds.

It imitates the script of the simulator first, also where its own decisions lead, then a mixture of the script's
decisions and random ones, with as many random ones as it takes. A plain loop beside the simulator on one device, whose
steps are a CUDA graph on a GPU: nothing is written but the policy.
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

from .tabletop_expert import advise

SEED = 2_000_000  # the first of seeds that no run learns from or is evaluated on
EVAL_SEED = 1_900_000


@dataclass(frozen=True)
class Views:
    """Views of the simulator, and what the script did there."""

    frames: Tensor  # [n, H, W, 3] uint8
    tasks: Tensor  # [n] int64
    decisions: Tensor  # [n, 2 * chunk] int64: bins
    places: Tensor  # [n, 8] float32, of finger, pucks and disc, within about 1

    def tensors(self) -> tuple[Tensor, ...]:
        return self.frames, self.tasks, self.decisions, self.places


class Memory:
    """The newest views on the device, in tensors that stay where they are."""

    def __init__(self, capacity: int, device: torch.device):
        self.num_views = 0  # ever added
        self.size = torch.zeros((), device=device)  # views that are there
        self._capacity, self._device = capacity, device
        self._kept: tuple[Tensor, ...] = ()

    def add(self, views: Views) -> None:
        if not self._kept:
            self._kept = tuple(
                torch.empty(self._capacity, *each.shape[1:], dtype=each.dtype, device=self._device)
                for each in views.tensors()
            )
        where = (self.num_views + torch.arange(len(views.tasks))) % self._capacity
        for kept, new in zip(self._kept, views.tensors(), strict=True):
            kept[where.to(self._device)] = new.to(self._device)
        self.num_views += len(views.tasks)
        self.size.fill_(min(self.num_views, self._capacity))

    def draw(self, num_views: int) -> Views:
        chosen = (torch.rand(num_views, device=self._device) * self.size).long()
        return Views(*(each[chosen] for each in self._kept))


def collect(
    worlds: Any, num_tasks: int, num_views: int, chunk: int, bins: int, seed: int, imitator: Imitator | None
) -> Views:
    """Play the script. Its actions are those of the middles of bins, as the policy's are.

    Episodes leave its path: every third decision is carried out at random or, where there is an imitator, every other
    one is the imitator's or at random. These are not to be imitated.
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
            drawn = random.random(len(acting))
            is_script = dict(zip(acting, drawn < (2 / 3 if imitator is None else 1 / 2), strict=True))
            own = np.full((worlds.num_worlds, chunk, 2), -1)
            if imitator is not None:
                its = [at for at, each in zip(acting, drawn, strict=True) if each >= 0.65]
                own[its] = imitator.decide([views[at].image for at in its], [tasks[at] for at in its], 1.0)
            taken: dict[int, list[int]] = {at: [] for at in acting}
            for turn in range(chunk):
                if not acting:
                    break
                advice = np.clip(np.floor((advise(worlds, acting) + 1) / 2 * bins), 0, bins - 1)
                chosen = np.array([is_script[at] for at in acting])[:, None]
                others = np.where(own[acting, turn] >= 0, own[acting, turn], random.integers(bins, size=advice.shape))
                indexes = np.where(chosen, advice, others).astype(int)
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
        self._num_image_tokens = len(image)
        length = max(map(len, prompts)) + self._num_sampled
        self._prompts = torch.zeros(len(prompts), length, dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            self._prompts[row, : len(prompt)] = torch.tensor(prompt)
        self._lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._looks = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
        self._last = len(processor.tokenizer) - 1  # the token of bin 0

    def logits(self, frames: Tensor, tasks: Tensor, decisions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute logits of the tokens of decisions, given those before them: [n, 2 * chunk, vocab].

        Also returns the last hidden state of the prompt's last token, [n, hidden]. Prompts begin with the image; those
        of different lengths are padded at the end, where no token looks. Nothing here waits for the device.
        """
        tokens = self._prompts[tasks].clone()
        places = self._lengths[tasks][:, None] + torch.arange(self._num_sampled, device=self._device)
        tokens.scatter_(1, places, self._last - decisions)
        pixels = (frames.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        llava = self.model.model
        seen = llava.multi_modal_projector(llava.vision_tower(pixels, output_hidden_states=True).hidden_states[-1])
        words = llava.language_model.embed_tokens(tokens[:, self._num_image_tokens :])
        hidden = llava.language_model(
            inputs_embeds=torch.cat([seen, words], dim=1), attention_mask=self._looks, use_cache=False
        ).last_hidden_state
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

    def decide(self, frames: Sequence[np.ndarray], tasks: Sequence[int], temperature: float) -> np.ndarray:
        """Sample decisions: [n, chunk, 2] bins."""
        if not tasks:
            return np.zeros((0, self._num_sampled // 2, 2), dtype=np.int64)
        decisions = self.sample(
            torch.from_numpy(np.stack(frames)).to(self._device), torch.tensor(tasks).to(self._device), temperature
        )
        return decisions.reshape(len(tasks), -1, 2).cpu().numpy()

    def success(self, worlds: Any, num_tasks: int, temperature: float) -> list[float]:
        """Play an episode in every world; return how many of each task succeed."""
        everywhere = list(range(worlds.num_worlds))
        tasks = [at % num_tasks for at in everywhere]
        seen = worlds.reset(everywhere, tasks, [EVAL_SEED + at for at in everywhere])
        views = [each.image for each in seen]
        acting, succeeded = everywhere, np.zeros(len(everywhere))
        while acting:
            decisions = self.decide([views[at] for at in acting], [tasks[at] for at in acting], temperature)
            actions = (decisions + 0.5) / self._bins * 2 - 1
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


class Trainer:
    """Steps of imitation. On a CUDA device a step is one graph, launched again and again."""

    def __init__(self, imitator: Imitator, memory: Memory, is_push: Tensor, batch_size: int, bins: int):
        device = is_push.device
        self._imitator, self._memory, self._batch_size, self._bins = imitator, memory, batch_size, bins
        self._weights = [*imitator.model.parameters(), *imitator.places.parameters()]
        self._is_graph = device.type == "cuda"
        self._rate = torch.zeros((), device=device)
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=self._rate, weight_decay=0.0, foreach=self._is_graph, capturable=self._is_graph
        )
        self._is_push, self._shares = is_push, torch.zeros(len(is_push), device=device)
        self._total = torch.zeros(2, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def learn(self, num_steps: int, rate: float, shares: tuple[float, float]) -> list[float]:
        """Take steps on batches in which these shares of the decisions, to reach and to push, are the script's.

        Returns the mean losses of decisions and of places.
        """
        self._rate.fill_(rate)
        self._shares.copy_(torch.where(self._is_push, shares[1], shares[0]))
        if self._is_graph and self._graph is None:
            self._capture()
        self._total.zero_()
        for _ in range(num_steps):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        return [each / num_steps for each in self._total.tolist()]

    def _step(self) -> None:
        views = self._memory.draw(self._batch_size)
        is_random = torch.rand(self._batch_size, device=self._shares.device) >= self._shares[views.tasks]
        decisions = torch.where(is_random[:, None], _random_like(views.decisions, self._bins), views.decisions)
        losses = torch.stack(self._imitator.loss(views.frames, views.tasks, decisions, views.places))
        self._optimizer.zero_grad(set_to_none=True)
        losses.sum().backward()
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        self._total += losses.detach()

    def _capture(self) -> None:
        """Take some steps on a stream of their own, as a capture needs, then record one."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._optimizer.zero_grad(set_to_none=True)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()


@dataclass(frozen=True)
class ImitationSettings:
    """Sizes of the imitation. limit_s: of its first part."""

    num_views: int  # of the script before the first step; a quarter as many between two looks
    batch_size: int
    limit_s: float
    capacity: int = 4  # newest views that are kept, in multiples of `num_views`
    num_steps: int = 1000  # between two looks at its success
    num_mixed_steps: int = 200  # of a mixture
    learning_rate: float = 1e-3
    enough: float = 0.95  # success of the script's imitation, at a temperature of 0.5, that ends the first part
    # Success that the second part leads to, of tasks to reach and to push.
    begin: tuple[tuple[float, float], tuple[float, float]] = ((0.05, 0.11), (0.05, 0.11))
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
    is_push = torch.tensor([task.startswith("push") for task in tasks], device=device)
    memory = Memory(settings.capacity * settings.num_views, device)
    memory.add(collect(worlds, len(tasks), settings.num_views, chunk, bins, seed=0, imitator=None))
    say(f"{memory.num_views} views of the script, {memory.num_views / (time.perf_counter() - began_s):,.0f}/s")
    trainer = Trainer(imitator, memory, is_push, settings.batch_size, bins)
    rate, num_steps = settings.learning_rate, 0
    while time.perf_counter() - began_s < settings.limit_s:
        losses = trainer.learn(settings.num_steps, rate, (1.0, 1.0))
        num_steps += settings.num_steps
        success = imitator.success(worlds, len(tasks), 0.5)
        say(
            f"{time.perf_counter() - began_s:5.0f} s  {num_steps:5} steps  loss {losses[0]:.3f}, of places"
            f" {losses[1]:.3f}  success at 0.5: {' '.join(f'{each:.0%}' for each in success)}"
        )
        rate = max(rate * 0.9, 1e-4)
        if np.mean(success) >= settings.enough:
            break
        memory.add(collect(worlds, len(tasks), settings.num_views // 4, chunk, bins, num_steps, imitator))
    shares = [*settings.shares]
    kinds = [
        [at for at, task in enumerate(tasks) if task.startswith("push") == is_pushed] for is_pushed in (False, True)
    ]
    for _ in range(settings.max_mixtures):
        trainer.learn(settings.num_mixed_steps, 5e-4, (shares[0], shares[1]))
        success = imitator.success(worlds, len(tasks), 1.0)
        say(
            f"{time.perf_counter() - began_s:5.0f} s  script's shares {shares[0]:.3f}, {shares[1]:.3f}  success at 1:"
            f" {' '.join(f'{each:.0%}' for each in success)}, mean {np.mean(success):.1%}"
        )
        means = [float(np.mean([success[at] for at in kind])) if kind else None for kind in kinds]
        factors = [_factor(mean, begin) for mean, begin in zip(means, settings.begin, strict=True)]
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
