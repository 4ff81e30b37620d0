r"""Distillation beside GRPO on GSM8K: accuracy on the test set over minutes, from one student on one GPU.

Each run is Hotseat's side of bench/real_tasks.py (its task, prompts, order, hyperparameters, and form of results) with
other options of Hotseat:

    grpo      rewards alone, 8 answers to a prompt
    distill   the reverse KL from a teacher's 64 likeliest tokens and the rest, on one answer to a prompt; no rewards
    both      the two losses together, 8 answers to a prompt

A run without rewards is evaluated like the others. Its steps have an eighth of the answers, and take less time: what
runs are compared by is minutes, which are counted from the command, with start and evaluations.

    python bench/distill.py --run distill --model STUDENT --teacher TEACHER --data D --out F --seed 1 --eval-every 5
    python bench/distill.py --run both ... --untimed        beside other runs on the device
    python bench/distill.py --run distill ... --learning-rate 1e-5 --label distill-1e-5
    python bench/distill.py --show F

Other options are those of bench/real_tasks.py. Without a GPU a run takes two steps of 4 prompts, with answers of 16
tokens, and 8 test problems: whether everything runs, and no figures.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import real_tasks
from lib.checkpoint import existing
from lib.tasks import GSM8K_REWARD
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Kind:
    """A kind of run. samples: answers to a prompt; None: as many as bench/real_tasks.py takes. options: of Hotseat."""

    samples: int | None = None
    has_teacher: bool = True
    options: tuple[str, ...] = ()


KINDS = {
    "grpo": Kind(has_teacher=False),
    "distill": Kind(samples=1, options=("reward.function=null", f"eval.reward={GSM8K_REWARD}")),
    "both": Kind(),
}
DIVERGENCE = ("algorithm.distill.coef=1", "algorithm.distill.divergence=reverse_kl", "algorithm.distill.top_k=64")


def run(own: argparse.Namespace, others: list[str]) -> None:
    kind = KINDS[own.run]
    options = [*kind.options, *(DIVERGENCE if kind.has_teacher else ())]
    if kind.has_teacher:
        options.append(f"reference.model={existing(own.teacher)}")
    # The parts of bench/real_tasks.py in processes of their own get the same arguments.
    sys.argv[1:] = [*others, "--side", "hotseat", "--label", own.label or own.run]
    prompts = real_tasks.arguments().prompts
    if kind.samples is not None:
        options += [f"rollout.samples_per_prompt={kind.samples}", f"train.batch_size={prompts * kind.samples}"]
    sys.argv += ["--set", *options, *own.set]
    args = real_tasks.arguments()
    if kind.samples is not None:
        args.size = replace(args.size, group=kind.samples)  # as it is recorded
    args.model, args.data, args.out = existing(args.model), args.data.resolve(), args.out.resolve()
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    real_tasks.run_side(args)


def show(out: Path) -> None:
    table = Table(title="GSM8K: accuracy on the test set over minutes from the command")
    for column in ("run", "answers a step", "step", "minutes", "accuracy", "divergence"):
        table.add_column(column, justify="right")
    for path in sorted(out.glob("*.jsonl")):
        found, apart = real_tasks.read_run(path), divergences(path)
        for each in found.evaluations:
            minutes = f"{each['at_s'] / 60:.2f}" if found.facts["is_timed"] else "shared"
            answers = str(found.facts["prompts"] * found.facts["group"])
            cells = (found.name, answers, str(each["step"]), minutes, f"{each['accuracy']:.1%}")
            table.add_row(*cells, apart.get(each["step"], ""), end_section=each is found.evaluations[-1])
    Console(width=110).print(table)


def divergences(results: Path) -> dict[int, str]:
    """Return the divergence from the teacher by step, which only the folder of the run has."""
    folders = sorted(results.parent.glob(f"{results.stem}-*/run/metrics.jsonl"))
    records = real_tasks.read_lines(folders[-1]) if folders else []
    return {record["step"]: f"{record['divergence']:.4f}" for record in records if "divergence" in record}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", choices=tuple(KINDS))
    what.add_argument("--show", type=Path, metavar="OUT", help="print the table of a folder's results")
    parser.add_argument("--teacher", type=Path, default=Path("build/qwen15"))
    parser.add_argument("--label", help="name of the run in files and tables; unset is its kind")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of the run")
    own, others = parser.parse_known_args()
    if own.show is not None:
        show(own.show)
    else:
        run(own, others)


if __name__ == "__main__":
    main()
