"""Tries custom functions and classes on toy batches, before a model loads.

A policy loss is called as `gspo_loss` is, an estimator by `call_estimator`, a sampler as `Sampler` says:

    def my_loss(log_probs, old_log_probs, advantages, layout, *, eps_low, eps_high): ...   # [num_tokens] or PolicyLoss
    def my_estimator(rewards, groups): ...                                                 # [num_episodes]
    def my_estimator(rewards, groups, lengths, log_probs, parts, part_weights): ...        # see `call_estimator`
    def my_sampler(num, pass_rates, num_draws, rng): ...                                   # num positions

A loss must not depend on the other episodes of its micro-batch, nor an estimator on other groups: batches are cut
anywhere between.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotseat.algorithms.advantages import call_estimator
from hotseat.algorithms.policy_loss import call_policy_loss
from hotseat.data.order import checked_choice
from hotseat.errors import UserError
from hotseat.types import TokenLayout
from hotseat.user_functions import absolute, described, load_component, user_function

_TOLERANCE = 1e-4  # between a whole toy batch and its parts
_MOVES = ("offload", "onload")


def _trial(find_problem: Callable[..., str | None]) -> Callable[..., str | None]:
    """Have a function that tries a user's function take its name instead, and return what it raises as a problem."""

    @functools.wraps(find_problem)
    def of_name(name: str, *arguments: Any, **options: Any) -> str | None:
        try:
            return find_problem(user_function(name), *arguments, **options)
        except UserError as error:
            return str(error)
        except Exception as error:
            return f"raised {described(error, Path(absolute(name).rpartition(':')[0]))}"

    return of_name


@_trial
def policy_loss_problem(function: Callable[..., Any], *, eps_low: float, eps_high: float) -> str | None:
    """Return why a user's loss cannot train a policy; None if it can, as far as a toy batch shows."""
    layout = _toy_layout()
    old = -torch.rand(layout.num_tokens, generator=torch.Generator().manual_seed(1)) - 0.5
    shift = torch.randn(layout.num_tokens, generator=torch.Generator().manual_seed(2)) / 10
    advantages = torch.tensor([1.0, -0.5, 0.25])[layout.token_episode]

    def call(tokens: int, part: TokenLayout) -> tuple[Tensor, Tensor]:
        log_probs = (old + shift)[:tokens].clone().requires_grad_()
        arguments = log_probs, old[:tokens], advantages[:tokens], part
        return log_probs, call_policy_loss(function, *arguments, eps_low=eps_low, eps_high=eps_high).loss

    log_probs, losses = call(layout.num_tokens, layout)
    problem = _tensor_problem(losses, layout.num_tokens, "token")
    if problem is not None:
        return problem
    if not losses.requires_grad:
        return "returned losses without a gradient: compute them from log_probs, without detach() or no_grad()"
    [gradient] = torch.autograd.grad(losses[layout.mask].sum(), log_probs, allow_unused=True)
    if gradient is None or not gradient[layout.mask].any():
        return "has no gradient with respect to log_probs: no token would be learned"
    if not gradient.isfinite().all():
        return "has a gradient that is not finite"
    part = TokenLayout(layout.mask[:9], layout.offsets[:4], layout.segment_episode[:3], 2)
    _, of_part = call(9, part)
    if torch.allclose(of_part[part.mask], losses[:9][part.mask], atol=_TOLERANCE):
        return None
    return (
        "gives an episode another loss when the next one is not in the micro-batch: return a loss per token that"
        " depends on its own episode alone; algorithm.aggregation takes the mean"
    )


@_trial
def estimator_problem(
    function: Callable[..., Any], samples_per_prompt: int, part_weights: Mapping[str, float] = MappingProxyType({})
) -> str | None:
    """Return why a user's estimator cannot be used; None if it can, as far as toy groups show.

    part_weights: those of the rewards that it may compare apart, by name.
    """
    lengths = torch.tensor([2, 3, 1, 4, 2])

    def call(rewards: list[float], groups: list[int]) -> Any:
        sizes = lengths[: len(rewards)]
        log_probs = -torch.arange(1.0, int(sizes.sum()) + 1) / 8
        parts = {name: torch.tensor(rewards).double() for name in part_weights}
        arguments = (torch.tensor(rewards), torch.tensor(groups), sizes.clone(), log_probs, parts, part_weights)
        return call_estimator(function, *arguments)

    advantages = call([0.0, 1.0, 1.0, 0.5, 0.25], [0, 0, 1, 1, 1])
    problem = _tensor_problem(advantages, 5, "episode")
    if problem is not None:
        return problem
    if not torch.allclose(call([0.0, 1.0], [0, 0]), advantages[:2], atol=_TOLERANCE):
        return "gives a group other advantages when another group is not there: compare episodes of one group only"
    if not call([1.0] * 4, [0, 0, 1, 1]).isfinite().all():
        return "is not finite for a group whose rewards are all equal: add a small number to what it divides by"
    if samples_per_prompt == 1 and not call([0.0, 1.0], [0, 1]).isfinite().all():
        return "is not finite for a group of one, and rollout.samples_per_prompt is 1: set that to 2 or more"
    return None


@_trial
def sampler_problem(function: Callable[..., Any]) -> str | None:
    """Return why a user's sampler cannot choose prompts; None if it can, as far as six toy prompts show."""
    rates, draws = np.array([np.nan, 0.0, 0.5, 1.0, np.nan, 0.25]), np.array([0, 1, 2, 1, 0, 3])
    chosen = []
    for known in (rates, np.full(6, np.nan), rates):  # at the beginning no prompt has a score
        generator = np.random.Generator(np.random.Philox(key=1))
        chosen.append(checked_choice(function(4, known.copy(), draws.copy(), generator), 4, 6))
    if chosen[0] != chosen[2]:
        return "chose differently from the same scores and generator: a resumed run would differ; use its rng only"
    return None


def _toy_layout() -> TokenLayout:
    """Three episodes of 6, 3 and 4 tokens; the first has two segments and a token that the environment inserted."""
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    return TokenLayout(mask, torch.tensor([0, 3, 6, 9, 13]), torch.tensor([0, 0, 1, 2]), 3)


def _tensor_problem(values: Any, count: int, what: str) -> str | None:
    if not isinstance(values, Tensor):
        return f"returned {type(values).__name__}: return a tensor with a number per {what}"
    if values.shape != (count,):
        return f"returned the shape {list(values.shape)} for {count} {what}s: return [{count}], a number per {what}"
    if not values.is_floating_point():
        return f"returned {values.dtype}: return floating-point numbers"
    if not values.isfinite().all():
        return f"returned {int((~values.isfinite()).sum())} numbers of {count} that are not finite"
    return None


def component_problem(name: str, path: str, kwargs: Mapping[str, Any], *, is_offloaded: bool) -> str | None:
    """Return why a class cannot be a component; None if it can, as far as its signatures show.

    name: the component's. kwargs: of its constructor. is_offloaded: the plan has it give up its devices between phases.
    """
    try:
        cls = load_component(path)
    except UserError as error:
        return str(error)
    run = getattr(cls, "run", None)
    if not inspect.isfunction(run):
        return f"{cls.__name__} has no method run(self, groups)"
    try:
        inspect.signature(run).bind(None, ())
    except TypeError:
        return f"{cls.__name__}.run{inspect.signature(run)}: it is called with the groups alone, run(self, groups)"
    try:
        signature = inspect.signature(cls)
    except ValueError:  # the constructor is C code, which does not say what it takes
        signature = None
    try:
        if signature is not None:
            signature.bind(**kwargs)
    except TypeError as error:
        return f"{cls.__name__}{signature} does not take kwargs {dict(kwargs)}: {error}"
    lacking = [name for name in _MOVES if not callable(getattr(cls, name, None))]
    if len(lacking) == 1:
        return f"{cls.__name__} has no {lacking[0]}: write both offload and onload, or none"
    if is_offloaded and lacking:
        return (
            f"{cls.__name__} has no methods offload and onload, and the plan has it leave its devices between phases:"
            f" write them, set components.{name}.enable_offload to false, or give it devices of its own"
        )
    return None
