"""The search for settings that make a plan fit: complete, the cheapest first, and short."""

import itertools
import random

import pytest

from hotseat.planning.search import Value, cheapest

ROLES = ("actor", "critic", "rollout")


class Needs:
    """A made-up planner: what each step needs, less what every value that concerns its roles gives or takes."""

    def __init__(self, rng: random.Random):
        self.choices = [
            [
                Value(rng.randint(1, 30) / 10, {f"key{choice}": value}, frozenset(rng.sample(ROLES, rng.randint(1, 3))))
                for value in range(rng.randint(1, 3))
            ]
            for choice in range(rng.randint(1, 4))
        ]
        self.steps = [frozenset(rng.sample(ROLES, rng.randint(1, 2))) for _ in range(rng.randint(1, 4))]
        self.excess = [rng.randint(-2, 8) for _ in self.steps]
        self.gains = {
            (step, choice, value): rng.randint(-2, 6)
            for step in range(len(self.steps))
            for choice, values in enumerate(self.choices)
            for value in range(len(values))
        }
        self.num_planned = 0

    def missed(self, settings):
        self.num_planned += 1
        return [roles for step, roles in enumerate(self.steps) if self._over(step, settings) > 0]

    def _over(self, step, settings):
        over = self.excess[step]
        for choice, values in enumerate(self.choices):
            for value, each in enumerate(values):
                if each.settings.items() <= settings.items() and each.roles & self.steps[step]:
                    over -= self.gains[step, choice, value]
        return over

    def brute_force(self):
        """The least cost of all combinations; None if none fits."""
        costs = []
        for values in itertools.product(*([None, *choice] for choice in self.choices)):
            taken = [value for value in values if value is not None]
            settings = {key: item for value in taken for key, item in value.settings.items()}
            if not self.missed(settings):
                costs.append(sum(value.cost for value in taken))
        return min(costs, default=None)


def test_the_search_finds_the_cheapest_of_all_combinations_wherever_one_fits():
    num_found = 0
    for seed in range(500):
        needs = Needs(random.Random(seed))
        found, least = cheapest(needs.choices, needs.missed), needs.brute_force()
        assert (found is None) == (least is None), seed
        if found is not None:
            num_found += 1
            cost = sum(v.cost for choice in needs.choices for v in choice if v.settings.items() <= found.items())
            assert cost == pytest.approx(least), seed
    assert 100 < num_found < 450  # both outcomes occur


def test_values_that_cannot_help_the_step_are_not_tried():
    """Ten choices for the actor do not matter where the rollout alone does not fit: 2 plans, not 2 to the 11th."""
    actor = [[Value(0.1, {f"actor{index}": True}, frozenset({"actor"}))] for index in range(10)]
    tried = []

    def missed(settings):
        tried.append(settings)
        return [frozenset({"rollout"})]

    assert cheapest([*actor, [Value(1.0, {"size": 8}, frozenset({"rollout"}))]], missed) is None
    assert tried == [{}, {"size": 8}]
