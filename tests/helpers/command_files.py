"""Shell commands as they stand in scripts, and the arguments that reach the Python module in them."""

import re
import shlex
from pathlib import Path

HERE = Path(__file__).parents[1] / "cli_openrlhf"
COMMANDS = sorted((HERE / "commands").glob("*.sh"))
FRAGMENTS = (HERE / "commands" / "fragments.txt").read_text().splitlines()
EXPECTED = sorted((HERE / "expected").glob("*.yaml"))


def read_command(path: Path) -> tuple[str, list[str], dict[str, str]]:
    """(command, arguments, exported variables): without comments, `ray job submit ... --` and launchers."""
    env = {}
    words = []
    for line in path.read_text().splitlines():
        line = line.rstrip().removesuffix("\\")
        if exported := re.match(r"\s*export (\w+)=(.*)", line):
            env[exported[1]] = exported[2]
        else:
            words += shlex.split(line, comments=True)
    start = next(index for index, word in enumerate(words) if word.startswith("openrlhf.cli."))
    return words[start].removeprefix("openrlhf.cli."), words[start + 1 :], env
