"""`hotseat launch slurm`: prints a script with which Slurm starts Ray on its nodes, and a run on it."""

from __future__ import annotations

import argparse
import shlex
import sys
from string import Template
from typing import TYPE_CHECKING

from hotseat.cli.offline_arguments import add_overrides
from hotseat.errors import UserError

if TYPE_CHECKING:
    from hotseat.config import Config

GRACE_S = 300  # before the time limit, for a run to finish its step and save it
MOST_REQUEUES = 10

_SCRIPT = Template(
    """#!/bin/bash
# $made_by
#SBATCH --job-name=$job
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
$directives
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@$grace_s

$setup
set -u
# Only processes of this job may talk to its Ray.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_ADDRESS
RAY_AUTH_TOKEN=$$(od -An -N32 -tx1 /dev/urandom | tr -d '[:space:]')

# This script runs on the first node. Its address is not that of its name, which in Debian's /etc/hosts is 127.0.1.1.
own_address=$$(hostname --all-ip-addresses | awk '{print $$1}')
RAY_ADDRESS="$$own_address:$$((20000 + SLURM_JOB_ID % 10000))"
env -u RAY_ADDRESS ray start --block --head --port="$${RAY_ADDRESS##*:}" --node-ip-address="$$own_address" \\
    $ray_resources --include-dashboard=false &
trap 'kill $$(jobs -p) 2>/dev/null' EXIT
$workers
python -m hotseat.cli.wait_for_nodes $nodes || exit

# Slurm sends TERM before the time limit: the run saves its step, and the job is queued again.
hotseat run $run &
run=$$!
is_stopped=
trap 'is_stopped=yes; kill -TERM "$$run"' TERM
wait "$$run"
code=$$?
while kill -0 "$$run" 2>/dev/null; do
    wait "$$run"
    code=$$?
done
if { [ -n "$$is_stopped" ] || [ "$$code" = 75 ]; } && [ "$${SLURM_RESTART_COUNT:-0}" -lt $requeues ]; then
    scontrol requeue "$$SLURM_JOB_ID"
fi
exit "$$code"
"""
)

_WORKERS = Template(
    """# On the others, until the job ends.
srun --nodes=$others --ntasks=$others --ntasks-per-node=1 --exclude="$$SLURMD_NODENAME" bash -c \\
    'exec env -u RAY_ADDRESS ray start --block --address="$$RAY_ADDRESS" $ray_resources \\
    --node-ip-address="$$(hostname --all-ip-addresses | cut -d" " -f1)"' &"""
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("launcher", choices=("slurm",), metavar="LAUNCHER", help="slurm: print a script for sbatch")
    command.add_argument("config", metavar="CONFIG", help="YAML file")
    add_overrides(command, "settings that replace the file's, such as rollout.top_p=0.9")
    command.add_argument("--nodes", type=int, required=True, metavar="N", help="machines")
    command.add_argument("--gpus-per-node", type=int, required=True, metavar="N", help="devices of each; 0: none")
    command.add_argument("--cpus-per-node", type=int, metavar="N", help="cores of each; default: as Slurm gives a task")
    command.add_argument(
        "--setup", default="", metavar="COMMANDS", help="shell commands before all, such as `source .venv/bin/activate`"
    )
    command.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="a further option of sbatch, such as --sbatch=--time=24:00:00; may be given several times",
    )


def run_slurm(arguments: argparse.Namespace) -> int:
    print(slurm_script(arguments), end="")
    return 0


def slurm_script(arguments: argparse.Namespace) -> str:
    """Return the script. Raises if the run could not be placed on these nodes: before it waits in a queue."""
    from hotseat.config import load
    from hotseat.planning.config_plan import make_plan

    for name, least in (("nodes", 1), ("gpus_per_node", 0)):
        if getattr(arguments, name) < least:
            raise UserError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least {least}")
    config = load(arguments.config, arguments.overrides)
    if config.cluster.runtime != "ray":
        raise UserError(f"cluster.runtime is {config.cluster.runtime}: on several nodes it has to be ray; leave it out")
    if config.cluster.num_nodes not in (None, arguments.nodes):
        raise UserError(
            f"cluster.num_nodes is {config.cluster.num_nodes}, but --nodes is {arguments.nodes}: leave one out"
        )
    make_plan(config, f"{arguments.nodes}x{arguments.gpus_per_node or 'cpu'}")
    for note in notes(config):
        print(f"note: {note}", file=sys.stderr)
    own = [] if config.cluster.num_nodes else [f"cluster.num_nodes={arguments.nodes}"]
    own += [] if config.checkpoint.resume else ["checkpoint.resume=true"]
    words = [shlex.quote(word) for word in (arguments.config, *arguments.overrides, *own)]
    if config.name is None:
        words.append('name="slurm-$SLURM_JOB_ID"')  # which it keeps when it is queued again
    resources, directives, setup = f"--num-gpus={arguments.gpus_per_node}", list(arguments.sbatch), [arguments.setup]
    if arguments.gpus_per_node:
        directives.insert(0, f"--gpus-per-node={arguments.gpus_per_node}")
    if arguments.cpus_per_node is not None:
        directives.insert(0, f"--cpus-per-task={arguments.cpus_per_node}")
        resources += f" --num-cpus={arguments.cpus_per_node}"
        setup.append(f"export SRUN_CPUS_PER_TASK={arguments.cpus_per_node}")
    others = arguments.nodes - 1
    return _SCRIPT.substitute(
        made_by=shlex.join(["hotseat", *sys.argv[1:]]).replace("\n", " "),
        job=shlex.quote(config.name or f"hotseat-{config.task}"),
        nodes=arguments.nodes,
        ray_resources=resources,
        directives="\n".join(f"#SBATCH {option}" for option in directives),
        setup="\n".join(filter(None, setup)),
        workers=_WORKERS.substitute(others=others, ray_resources=resources) if others else "",
        grace_s=GRACE_S,
        requeues=MOST_REQUEUES,
        run=" ".join(words),
    )


def notes(config: Config) -> list[str]:
    """Return what users should know before they queue this run."""
    if config.checkpoint.is_made:
        return []
    return ["no checkpoints are made: a job that is queued again begins at step 1; set checkpoint.every"]
