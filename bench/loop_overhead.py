"""What the loop itself costs: a step with a model so small that computing hardly counts, from 64 to 4,096 samples.

One run on Ray per size, as `hotseat run` does it: actor and engine take turns on one device, agents, reward function
and driver in processes of their own. The model has one layer of width 16, an answer is one token, and a sample is used
once. "driver" is the processor time of the driver process, the part that no device and no other process can take over.

With --staleness rollout runs beside training, so that finished groups go through the spool; with --hosts several
processes run agents and rewards; then the mean says more than the median, because steps wait for each other's groups.

    python bench/loop_overhead.py [--sizes 64 256 1024 4096] [--steps 12] [--staleness 1] [--hosts 2]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from lib.sums import make_sums
from rich.console import Console
from rich.table import Table

from hotseat.config import loads
from hotseat.loop import run
from hotseat.observe import read_lines

GROUP_SIZE = 8
NUM_WARM_UP = 3  # steps that do not count
PHASES = ("rollout", "prepare", "update", "sync")

CONFIG = """
task: rl
name: samples-{num_samples}
run_dir: {directory}
actor: {{model: {directory}/model, optimizer: {{learning_rate: 1e-5, schedule: constant}}}}
data: {{path: {directory}/prompts.jsonl, label_key: label, max_length: 8, max_samples: {num_prompts}}}
reward: {{function: {directory}/reward.py}}
rollout: {{batch_size: {batch_size}, samples_per_prompt: 8, max_new_tokens: 1, num_slots: 256}}
train: {{dtype: fp32, batch_size: {num_samples}, micro_batch_size: {micro_batch_size}}}
log: {{every: 1000}}
{ahead}"""

AHEAD = """
cluster: {{component_placement: {{actor: 0, rollout: 1}}}}
overlap: {{staleness: {staleness}}}
"""

REWARD = """
def reward_func(queries, prompts, labels):
    return [index / 8 for index in range(len(queries))]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=1)
    arguments = parser.parse_args()
    phases = ("wait", "drain", *PHASES[1:]) if arguments.staleness else PHASES
    names = ["samples", "step ms", *(f"{phase} ms" for phase in phases), "µs/sample", "mean", "driver µs/sample"]
    table = Table(*names)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_sums(directory, max(arguments.sizes) // GROUP_SIZE * arguments.steps, 16, REWARD)
        for num_samples in arguments.sizes:
            batch_size = num_samples // GROUP_SIZE
            num_prompts = batch_size * arguments.steps
            text = CONFIG.format(
                directory=directory,
                num_samples=num_samples,
                micro_batch_size=min(num_samples, 1024),
                batch_size=batch_size,
                num_prompts=num_prompts,
                ahead=AHEAD.format(staleness=arguments.staleness) if arguments.staleness else "",
            )
            run.start(loads(text, [f"rollout.num_hosts={arguments.hosts}"]))
            records = read_lines(directory / f"samples-{num_samples}" / "metrics.jsonl")
            records = [record for record in records if "step_s" in record][NUM_WARM_UP:]
            step_s = statistics.median(record["step_s"] for record in records)
            mean_s = statistics.fmean(record["step_s"] for record in records)
            seconds = [statistics.median(record[f"time/{phase}"] for record in records) for phase in phases]
            driver_s = statistics.median(record["time/driver_cpu"] for record in records)
            cells = [f"{num_samples:,}", f"{1e3 * step_s:.0f}", *(f"{1e3 * each:.0f}" for each in seconds)]
            table.add_row(*cells, *(f"{1e6 * each / num_samples:.0f}" for each in (step_s, mean_s, driver_s)))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
