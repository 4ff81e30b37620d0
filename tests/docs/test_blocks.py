"""Every block of code in README and docs does what its tag says: it runs, is planned, or has a log."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import preloaded
import pytest
from pages import PAGES, ROOT, Block, blocks_of

from hotseat.cli.main import make_parser
from hotseat.config import loads

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
WIDE = 1200.0
_NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]?\d+)?")


def test_every_block_has_one_tag():
    assert not [f"{block}: {block.mistake}" for block in BLOCKS if block.mistake]


def test_blocks_of_the_gpu_have_a_log():
    assert not [str(block) for block in BLOCKS if "h200" in block.named and not (ROOT / block.named["h200"]).is_file()]


@cache
def functions_of(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_blocks_that_a_test_runs_name_it():
    for block in BLOCKS:
        if "tested" in block.named:
            file, _, name = block.named["tested"].partition("::")
            assert (ROOT / file).is_file(), block
            assert not name or name in functions_of(ROOT / file), block


@pytest.mark.parametrize("block", [block for block in BLOCKS if "planned" in block.words], ids=str)
def test_planned_blocks_are_valid(block: Block):
    """Keys and values of a config fit each other, and a command line is one of `hotseat`'s."""
    if block.language == "yaml":
        loads(block.text)
        return
    assert block.language == "bash", block
    parser = make_parser()
    lines = [line for line in block.text.replace("\\\n", " ").splitlines() if line.startswith("hotseat ")]
    for line in lines:
        parser.parse_args(shlex.split(line, comments=True)[1:])


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_short_blocks_run(page: Path, tmp_path: Path):
    _run(blocks_of(page), tmp_path, is_long=False)


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_all_blocks_run(page: Path, tmp_path: Path):
    _run(blocks_of(page), tmp_path, is_long=True)


def _run(blocks: list[Block], folder: Path, *, is_long: bool) -> None:
    """Run the blocks of a page in order, in one folder: until the first long one, or all of them."""
    if not any("run" in block.words and (is_long or "long" not in block.words) for block in blocks):
        return
    (folder / "bin").mkdir()
    command = folder / "bin" / "hotseat"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m hotseat "$@"\n')
    command.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "COLUMNS": "160",
    }
    place = folder / "page"
    place.mkdir()
    printed = ""
    for block in blocks:
        if "long" in block.words and not is_long:
            return
        if "file" in block.named:
            path = place / block.named["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif "run" in block.words:
            code, printed, place = _run_one(block, place, environment, folder / "place")
            assert code == 0, f"{block} ended with {code}:\n{printed[-4000:]}"
        elif "output" in block.words:
            _check_output(block, printed)


def _run_one(block: Block, place: Path, environment: dict[str, str], end: Path) -> tuple[int, str, Path]:
    """Return exit code, output, and the folder in which the block ended."""
    if block.language == "python":
        arguments, run = [sys.executable, "-c", block.text], preloaded.run
    else:
        script = f"set -euo pipefail\n{block.text}\npwd > {shlex.quote(str(end))}\n"
        arguments, run = ["bash", "-c", script], subprocess.run
    ended = run(
        arguments, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WIDE
    )
    return ended.returncode, ended.stdout, Path(end.read_text().strip()) if end.exists() else place


def _check_output(block: Block, printed: str) -> None:
    """Each line was printed, in this order; numbers may differ, and `...` stands for lines that are left out."""
    lines = iter([_plain(line) for line in printed.splitlines()])
    for line in block.text.splitlines():
        if line.strip() not in {"", "..."}:
            assert _plain(line) in lines, f"{block}: {line!r} was not printed (in this order):\n{printed[-4000:]}"


def _plain(line: str) -> str:
    """A line without what differs between machines: numbers, the lengths of bars, and white space."""
    return " ".join(_NUMBER.sub("#", re.sub("[█▏▎▍▌▋▊▉━╸]+", "█", line)).split())
