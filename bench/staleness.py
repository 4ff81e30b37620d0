"""What staleness costs in learning, and whether order of arrival prefers short answers.

    python bench/staleness.py learning [--seeds 0 1 2] [--staleness 0 1 2 4] [--prompts 5120]
    python bench/staleness.py lengths [--steps 60] [--staleness 1 2 4] [--queue 1]

learning: the demo's GRPO after its SFT, with the same number of samples for every staleness, and its accuracy on 2,000
held-out sums. Order of arrival, open requests keep their cache, the queue is as long as the staleness.

lengths: a tiny model that does not learn and whose answers have 1 to 24 tokens. For each step k from 20 on, the largest
Kolmogorov-Smirnov distance between the lengths trained by step k and those of the first k batches that began.

Everything in one process. A line is printed as soon as it is known.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hotseat import demo
from hotseat.cli.demo_command import GRPO, SFT
from hotseat.config import loads
from hotseat.loop.rl.arrivals import recorded_batches
from hotseat.loop.run import start
from hotseat.loop.state.run_dir import ARRIVALS, ROLLOUTS
from hotseat.loop.workers.spool import Spool
from hotseat.observe import read_lines

BESIDE = (
    "cluster: {runtime: local, threads_per_process: 2, inventory: 1x2, component_placement: {actor: 0, rollout: 1}}"
)
NUM_HELD_OUT = 2_000
GROUPS = 16
FIRST_STEP = 20  # from which lengths are compared


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("what", nargs="?", choices=["learning", "lengths"], default="lengths")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--staleness", type=int, nargs="+")
    arguments.add_argument("--prompts", type=int, default=5_120)
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--queue", type=int, help="of the lengths; by default as long as the staleness")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "learning":
            measure_learning(Path(folder), options.seeds, options.staleness or [0, 1, 2, 4], options.prompts)
        else:
            measure_lengths(Path(folder), options.staleness or [1, 2, 4], options.queue, options.steps)


# --- learning ---------------------------------------------------------------------------------------------------------


def measure_learning(folder: Path, seeds: Sequence[int], values: Sequence[int], num_prompts: int) -> None:
    """Print the final accuracy of each run, and the mean over seeds."""
    demo.NUM_EVAL = NUM_HELD_OUT
    accuracies: dict[int, list[float]] = {staleness: [] for staleness in values}
    for seed in seeds:
        directory = folder / f"seed-{seed}"
        files = demo.make_files(directory, seed)
        names = {"directory": directory, "seed": seed, "num_prompts": num_prompts, **vars(files)}
        start(loads(SFT.format(**names)))
        for staleness in values:
            rows = learn(directory, GRPO.format(**names), staleness)
            accuracies[staleness].append(rows[-1]["eval/accuracy"])
            ages = [row.get("staleness", 0.0) for row in rows[1:]]
            print(
                f"RESULT seed {seed} staleness {staleness}: accuracy {rows[0]['eval/accuracy']:.2%} ->"
                f" {rows[-1]['eval/accuracy']:.2%} after {len(rows) - 1} steps, mean age {statistics.fmean(ages):.2f}",
                flush=True,
            )
    for staleness, each in accuracies.items():
        print(f"RESULT staleness {staleness}: mean accuracy {statistics.fmean(each):.2%} of {len(each)} seeds")


def learn(directory: Path, text: str, staleness: int) -> list[dict]:
    """Run GRPO with some staleness; return its metrics, step by step."""
    name = f"staleness-{staleness}"
    before, _, after = text.partition("cluster:\n")
    _, _, after = after.partition("actor:\n")
    overlap = f"overlap: {{staleness: {staleness}, order: arrival, in_flight: keep}}\n" if staleness else ""
    config = loads(
        f"{before}{BESIDE}\n{overlap}actor:\n{after}",
        [f"name={name}", "eval.every=1000000", "checkpoint.every_minutes=0", "log.samples_per_step=0"],
    )
    start(config)
    return read_lines(directory / name / "metrics.jsonl")


# --- lengths ----------------------------------------------------------------------------------------------------------


def measure_lengths(folder: Path, values: Sequence[int], queue: int | None, num_steps: int) -> None:
    """Print the largest distance between the lengths that were trained and those that began."""
    demo.make_model(folder / "model", 0, width=32)
    rows = [f'{{"input": "{number % 10}+{number // 10 % 10}=", "label": "1"}}' for number in range(num_steps * GROUPS)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    (folder / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [float(len(query)) for query in queries]\n"
    )
    for staleness in values:
        ahead = staleness if queue is None else queue
        config = f"""
name: lengths-{staleness}
run_dir: {folder}/runs
{BESIDE}
overlap: {{staleness: {staleness}, queue: {ahead}, order: arrival, in_flight: keep}}
actor: {{model: {folder}/model, optimizer: {{learning_rate: 1.0e-9, schedule: constant}}}}
data: {{path: {folder}/prompts.jsonl, label_key: label, max_length: 30}}
reward: {{function: {folder}/reward.py}}
rollout: {{batch_size: {GROUPS}, samples_per_prompt: 1, max_new_tokens: 24, num_slots: {GROUPS}}}
algorithm: {{estimator: reinforce}}
train: {{dtype: fp32, batch_size: {GROUPS}}}
log: {{samples_per_step: 0, keep_rollouts: true}}
checkpoint: {{every_minutes: 0}}
"""
        start(loads(config))
        distance, step, mean = largest_distance(folder / "runs" / f"lengths-{staleness}")
        print(
            f"RESULT lengths, staleness {staleness}, queue {ahead}: largest KS distance {distance:.3f}, at step {step}"
            f" of {num_steps}; mean length {mean:.1f}",
            flush=True,
        )


def largest_distance(run_dir: Path) -> tuple[float, int, float]:
    """Return the largest distance from step 20 on, its step, and the mean length."""
    spool = Spool(run_dir / ROLLOUTS)
    begun: list[tuple[int, int]] = []
    for line in read_lines(run_dir / ARRIVALS):
        if line["event"] == "begun":
            begun += [key for key in map(tuple, line["groups"]) if key not in begun]
    lengths = {key: length_of(spool, key) for key in begun}
    batches = recorded_batches(run_dir)
    trained: list[int] = []
    largest, at = 0.0, 0
    for step, batch in sorted(batches.items()):
        trained += [lengths[epoch, prompt] for epoch, prompt in batch["groups"]]
        distance = ks_distance(trained, [lengths[key] for key in begun[: len(trained)]])
        if step >= FIRST_STEP and distance >= largest:
            largest, at = distance, step
    return largest, at, statistics.fmean(lengths.values())


def length_of(spool: Spool, key: tuple[int, int]) -> int:
    """Return how many tokens were sampled for a group of one answer."""
    finished = spool.get(key)
    assert finished is not None
    [sample] = finished.group.samples
    return sum(int(segment.mask.sum()) for segment in sample.episode.segments)


def ks_distance(a: Sequence[int], b: Sequence[int]) -> float:
    """Return the largest difference between two empirical distribution functions."""
    return max(abs(sum(x <= value for x in a) / len(a) - sum(x <= value for x in b) / len(b)) for value in {*a, *b})


if __name__ == "__main__":
    main()
