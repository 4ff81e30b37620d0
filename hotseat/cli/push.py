"""`hotseat push`: pushes the model of a run to a hub, with a card made from the run."""

from __future__ import annotations

import argparse
from pathlib import Path

from hotseat.checks.run_directory import CONFIG
from hotseat.config import loads_saved
from hotseat.errors import UserError
from hotseat.loop.state.checkpoints import MODEL
from hotseat.loop.state.hub_push import push


def run_push(arguments: argparse.Namespace) -> int:
    run_dir = Path(arguments.run_dir)
    path = run_dir / CONFIG
    if not path.is_file():
        raise UserError(f"{run_dir} holds no run: there is no {path}")
    config = loads_saved(path.read_text())
    checkpoint = config.checkpoint
    repo = arguments.repo or checkpoint.push_to_hub
    if repo is None:
        raise UserError("where to push to? give --repo USER/NAME: the run has no checkpoint.push_to_hub")
    is_private = checkpoint.push_private if arguments.private is None else arguments.private
    print(push(run_dir.resolve(), Path(checkpoint.export_path or run_dir / MODEL), repo, is_private))
    return 0
