"""`hotseat plan CONFIG --auto PROFILE`: the placements that are predicted to be fastest, as YAML to paste."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from hotseat.config import Config
from hotseat.config.presence import has_simulator
from hotseat.errors import UserError
from hotseat.loop.rl.auto_placement import Prediction, Profile, predict, ranked
from hotseat.planning.candidates import Candidate, Refused, candidates
from hotseat.planning.config_plan import make_plan

NUM_SHOWN = 5
STALENESS = (0, 1, 2)


def print_auto(config: Config, inventory: str | None, path: Path, console: Console) -> None:
    """Print the best placements of a config, and how its own compares."""
    if not config.has_rollouts:
        raise UserError(f"--auto places actor and rollout of task rl; the task of this config is {config.task}")
    profile = Profile.read(path)
    staleness = sorted({*STALENESS, config.overlap.staleness})
    made = list(candidates(config, inventory, profile.tensor_parallel_sizes, staleness))
    possible = [each for each in made if isinstance(each, Candidate)]
    if not possible:
        raise UserError("no placement is possible:\n" + "\n".join(f"  {reason}" for reason in _reasons(made)))
    best = ranked(possible, profile)
    console.print(_table(best[:NUM_SHOWN]))
    if config.rollout.tensor_parallel_size in profile.tensor_parallel_sizes:
        own = predict(config, make_plan(config, inventory), profile)
        console.print(f"As configured: {own.step_s:.2f} s per step", highlight=False)
    console.print(_notes(made, best), style="dim", highlight=False)
    for number, (candidate, prediction) in enumerate(best[:NUM_SHOWN], 1):
        console.print(f"\n# {number}: {prediction.step_s:.2f} s per step", highlight=False)
        console.print(f"{candidate.as_yaml()}".rstrip(), highlight=False, markup=False, soft_wrap=True)


def _table(best: list[tuple[Candidate, Prediction]]) -> Table:
    table = Table(box=box.SIMPLE)
    has_env = any(has_simulator(candidate.config) for candidate, _ in best)
    roles = ("actor", "env", "rollout") if has_env else ("actor", "rollout")
    for heading in ("", *roles):
        table.add_column(heading)
    numbers = ("s per step", "samples/s", "rollout s", "training s")
    for heading in ("engines", "stages" if has_env else "staleness", *numbers):
        table.add_column(heading, justify="right")
    for number, (candidate, prediction) in enumerate(best, 1):
        placement, config = candidate.settings["cluster.component_placement"], candidate.config
        size = config.rollout.tensor_parallel_size
        training_s = sum(seconds for phase, seconds in prediction.phases.items() if phase != "rollout")
        table.add_row(
            str(number),
            *(placement[role] for role in roles),
            f"{candidate.num_engines}" + (f" x {size}" if size > 1 else ""),
            str(config.rollout.pipeline_stage_num if has_env else config.overlap.staleness),
            f"{prediction.step_s:.2f}{'*' if prediction.is_extrapolated else ''}",
            f"{prediction.samples_per_s:.1f}",
            f"{prediction.phases['rollout']:.2f}",
            f"{training_s:.2f}",
        )
    return table


def _notes(made: list[Candidate | Refused], best: list[tuple[Candidate, Prediction]]) -> str:
    lines = [f"{len(made)} placements, {len(best)} possible."]
    lines += [f"Refused: {reason}" for reason in _reasons(made)]
    if any(prediction.is_extrapolated for _, prediction in best[:NUM_SHOWN]):
        lines.append("* an engine or a rank has more or fewer samples than any that was measured")
    if any(prediction.lacks_moves for _, prediction in best[:NUM_SHOWN]):
        lines.append(
            "Offload and onload are missing where rollout and training share devices: they share none in the placement"
            " that was measured."
        )
    if any(candidate.config.overlap.staleness for candidate, _ in best[:NUM_SHOWN]):
        lines.append("With staleness S, samples are learned up to S versions after they began: see docs/async.md.")
    return "\n".join(lines)


def _reasons(made: list[Candidate | Refused]) -> list[str]:
    """Return why placements were refused, each reason once with the number of placements."""
    counts = Counter(" ".join(each.because.split()) for each in made if isinstance(each, Refused))
    return [f"{count} x {reason}" for reason, count in counts.items()]
