"""`hotseat check`: what this machine, or every node of a cluster, has for runs, and what to do about the rest."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hotseat.cli.ending import OK, REFUSED
from hotseat.cli.offline_arguments import add_overrides
from hotseat.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from hotseat.checks.findings import Finding


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file: also check that this run could start")
    add_overrides(command, "settings that replace the file's")
    command.add_argument(
        "--cluster",
        metavar="FOLDER",
        help="check the cluster at RAY_ADDRESS instead: versions and clocks of its nodes, links, sums, and short runs"
        " over all devices, whose files go to this folder, which all nodes have to share",
    )


def run_check(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from hotseat.checks.findings import findings

    console = Console(width=120)
    if arguments.cluster is not None:
        from hotseat.cli.cluster_check import cluster_findings

        if arguments.config is not None:
            raise UserError(f"--cluster checks the cluster, not a config: leave {arguments.config} out")
        return show(cluster_findings(arguments.cluster), console)
    code = show(findings(), console)
    if arguments.config is None:
        return code
    from hotseat.checks.pipeline import check_prerequisites
    from hotseat.config import load

    check_prerequisites(load(arguments.config, arguments.overrides))
    console.print(f"{arguments.config}: nothing that shows without data or models would stop this run")
    return code


def show(found: Iterable[Finding], console: Console) -> int:
    """Print findings as they come, then what to do, and return the exit code."""
    from rich.table import Table
    from rich.text import Text

    kept = []
    with console.status("looking") as status:
        for finding in found:
            kept.append(finding)
            status.update(f"after {finding.what}")
            mark = "[red]✗[/]" if finding.stops else "[yellow]![/]" if finding.advice else "[green]✓[/]"
            line = Table.grid(padding=(0, 2))
            line.add_column(width=1)
            line.add_column(width=22)
            line.add_column()
            line.add_row(mark, Text(finding.what), Text(finding.text))  # brackets, as of extras, are no markup
            console.print(line)
    for finding in kept:
        if finding.advice:
            style = "red" if finding.stops else "yellow"
            console.print(Text(f"{finding.what}: {finding.advice}", style), soft_wrap=True)
    return REFUSED if any(finding.stops for finding in kept) else OK
