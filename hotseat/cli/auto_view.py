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
    own = _own(config, inventory, profile)
    console.print(_table(best[:NUM_SHOWN]))
    if own is not None:
        console.print(f"As configured: {own.step_s:.2f} s per step", highlight=False)
    console.print(_notes(made, best), style="dim", highlight=False)
    for number, (candidate, prediction) in enumerate(best[:NUM_SHOWN], 1):
        console.print(f"\n# {number}: {prediction.step_s:.2f} s per step", highlight=False)
        console.print(f"{candidate.as_yaml()}".rstrip(), highlight=False, markup=False, soft_wrap=True)


def _own(config: Config, inventory: str | None, profile: Profile) -> Prediction | None:
    """Predict the config's own placement; None if the profile does not have its tensor-parallel size."""
    if config.rollout.tensor_parallel_size not in profile.tensor_parallel_sizes:
        return None
    return predict(config, make_plan(config, inventory), profile)


def _table(best: list[tuple[Candidate, Prediction]]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("")
    has_env = any(has_simulator(candidate.config) for candidate, _ in best)
    for heading in ("actor", *(("env",) if has_env else ()), "rollout"):
        table.add_column(heading)
    for heading in (
        "engines",
        "stages" if has_env else "staleness",
        "s per step",
        "samples/s",
        "rollout s",
        "training s",
    ):
        table.add_column(heading, justify="right")
    for number, (candidate, prediction) in enumerate(best, 1):
        placement, size = (
            candidate.settings["cluster.component_placement"],
            candidate.config.rollout.tensor_parallel_size,
        )
        table.add_row(
            str(number),
            placement["actor"],
            *((placement["env"],) if has_env else ()),
            placement["rollout"],
            f"{candidate.num_engines}" + (f" x {size}" if size > 1 else ""),
            str(candidate.config.rollout.pipeline_stage_num if has_env else candidate.config.overlap.staleness),
            *_numbers(prediction),
        )
    return table


def _numbers(prediction: Prediction) -> tuple[str, ...]:
    training_s = sum(seconds for phase, seconds in prediction.phases.items() if phase != "rollout")
    mark = "*" if prediction.is_extrapolated else ""
    return (
        f"{prediction.step_s:.2f}{mark}",
        f"{prediction.samples_per_s:.1f}",
        f"{prediction.phases['rollout']:.2f}",
        f"{training_s:.2f}",
    )


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
