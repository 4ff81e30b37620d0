"""The `hotseat` command. Heavy imports happen inside the subcommand that needs them."""

from __future__ import annotations

import argparse
import functools
import json
import pkgutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hotseat import __version__, clock, interrupts
from hotseat.cli import check_command, completion, help_texts, launch_command, new, offline_arguments, serving
from hotseat.cli.ending import OK, REFUSED, leave, reported
from hotseat.errors import UserError
from hotseat.openmp import wait_passively
from hotseat.processes import kept_driver

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


_GENERATE = "answer prompts with a model, and write JSON lines"
_EVAL = "measure a model: accuracy, pass@k and lengths, and a page of its answers"
_PLAY = "play one episode of an agent, with a live transcript and without training"
_STATUS = "show how a run is: its step and phase, whether it makes progress, or how it ended"
_DIAGNOSE = "say why an RL run collapsed: its likely causes, with figures and what to change"
_MERGE = "add a LoRA adapter to its base model, and write a plain model"
# These only print, so `| head` ends them like any such command. A run must not die of a closed pipe.
_PRINTING = ("plan", "explain", "config", "options", "completion", "openrlhf-path", "verl-path", "rlinf-path")


def entry() -> None:
    """Run the command that the arguments of this process name, and exit."""
    interrupts.handle_until_exit()
    wait_passively()
    if sys.argv[1:2] in [[name] for name in _PRINTING]:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    leave(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    clock.begin()
    arguments = parse(argv)

    def run_subcommand() -> int:
        function = arguments.run  # set by `_command`
        if isinstance(function, str):
            function = pkgutil.resolve_name(f"hotseat.{function}")
        return int(function(arguments))

    return reported("hotseat", run_subcommand)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command. Overrides may stand anywhere, also after options."""
    parser = make_parser(argv[0] if argv else "")
    arguments, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-") or not hasattr(arguments, "overrides")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def make_parser(command: str = "") -> argparse.ArgumentParser:
    """Make the parser of all commands.

    command: name of the command that the user typed; help texts that need the config tree are made for it alone.
    """
    parser = argparse.ArgumentParser(
        prog="hotseat",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train language models by reinforcement learning (GRPO, PPO, RLOO, REINFORCE++), supervised\n"
        "fine-tuning and reward modelling, on the same devices or on separate ones.",
        epilog=help_texts.MAIN,
    )
    parser.add_argument("--version", action="version", version=f"hotseat {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    _add_runs(commands, command)
    _add_records(commands)
    _add_offline(commands)
    _add_planning(commands)
    check_command.add_arguments(
        _command(commands, "check", check_command.run_check, "show what this machine, or a cluster, has for runs")
    )
    show = _command(commands, "config", _config, "check a config and print what differs from the defaults")
    _add_config_arguments(show)

    options = _command(commands, "options", _options, "list every config key with its default and meaning")
    options.add_argument("section", nargs="?", default="", help="only keys below this one, such as rollout")
    options.add_argument("--json", action="store_true", help="print a JSON list instead, an object for each key")

    for framework, runs in (
        ("openrlhf", "`python -m openrlhf.cli...`"),
        ("verl", "`python -m verl.trainer.main_ppo`"),
        ("rlinf", "RLinf's script for embodied tasks"),
    ):
        text = f"print the directory that runs {runs} on Hotseat"
        _command(commands, f"{framework}-path", functools.partial(_shim_path, framework), text)

    rlinf = _command(
        commands,
        "rlinf-config",
        "rlinf.config_command:run_rlinf_config",
        "print a config of RLinf in our keys, and what is left",
    )
    rlinf.add_argument("config", metavar="RLINF.yaml", help="a config of RLinf")
    offline_arguments.add_overrides(rlinf, "further settings, in our keys")

    completion.add_arguments(
        _command(
            commands, "completion", completion.run_completion, "print a script with which a shell completes commands"
        )
    )
    return parser


def _add_runs(commands: _Commands, command: str) -> None:
    """Add the commands that train. command: the one in use."""
    new.add_arguments(
        _command(commands, "new", new.run_new, "write the files of a first run: config, data, reward, model")
    )

    run = _command(commands, "run", _run, "train: run a config to its end")
    _add_config_arguments(run)

    launch_command.add_arguments(
        _command(commands, "launch", launch_command.run_slurm, "print a script that runs a config on a cluster")
    )

    resume = _command(commands, "resume", _resume, "resume a run from its newest checkpoint")
    text = "directory of the run, such as runs/rl-1, or the URL of its checkpoints, such as s3://bucket/rl-1"
    resume.add_argument("run_dir", metavar="RUN_DIR", help=text)
    offline_arguments.add_overrides(
        resume,
        "settings to change from the next step on, such as actor.optimizer.learning_rate=5e-7; they are recorded",
    )
    for each in (run, resume):
        each.add_argument(
            "--allow-change",
            action="append",
            default=[],
            metavar="KEY",
            help="when a run is resumed, also allow a change of KEY (or of every key below it) that `hotseat resume"
            " --help` does not list; the results are then not those of the uninterrupted run",
        )
    if command == "resume":
        resume.epilog = f"{resume.epilog}\n{_what_may_change()}\n\n{help_texts.RUN_EXIT_CODES}"

    text = "train a recorded run again from its kept groups, or a part of it"
    replay = _command(commands, "replay", "cli.replay:run_replay", text)
    replay.add_argument("run_dir", metavar="RUN_DIR", help="directory of a run that had log.keep_rollouts=true")
    offline_arguments.add_overrides(replay, "settings that are to differ from the run's")
    replay.add_argument(
        "--from-step", type=int, default=0, metavar="STEP", help="begin with the checkpoint of this step (default: 0)"
    )
    replay.add_argument("--to-step", type=int, metavar="STEP", help="end after this step (default: the last one kept)")
    replay.add_argument("--evaluate", action="store_true", help="evaluate as the run did, which starts an engine")


def _add_records(commands: _Commands) -> None:
    """Add the commands that show or publish what a run wrote."""
    for name, run, text in (
        ("status", "cli.status_view:run_status", _STATUS),
        ("diagnose", "cli.diagnose_view:run_diagnose", _DIAGNOSE),
    ):
        look = _command(commands, name, run, text)
        look.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run, such as runs/rl-1")
        look.add_argument("--json", action="store_true", help="print a JSON object instead")
    look.add_argument(
        "--try",
        dest="trial",
        nargs="*",
        metavar="KEY=VALUE",
        help="try a cure from a checkpoint before the harm, in a directory of its own: these settings, or without any"
        " those of the first cause",
    )
    look.add_argument("--steps", type=int, metavar="N", help="steps that a trial may take at most (default: 30)")

    ledger = _command(
        commands,
        "ledger",
        "cli.ledger_view:run_ledger",
        "count what became of a run's samples, or show the history of one",
    )
    ledger.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run")
    ledger.add_argument("--sample", metavar="PASS/PROMPT/SAMPLE", help="only this one, such as 0/17/3")

    text = "push the model of a run to the Hugging Face Hub, with a card"
    push = _command(commands, "push", "cli.push:run_push", text)
    push.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run, such as runs/rl-1")
    push.add_argument("--repo", metavar="REPO", help="NAME or USER/NAME (default: the run's checkpoint.push_to_hub)")
    visibility = push.add_mutually_exclusive_group()
    visibility.add_argument(
        "--private", action="store_true", default=None, help="make a new repository private (the default)"
    )
    visibility.add_argument("--public", dest="private", action="store_false", help="make a new repository public")

    report = _command(commands, "report", _report, "write one page that shows all of a run, or of several side by side")
    report.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="directory of a run; several are compared")
    report.add_argument(
        "--output", metavar="FILE", help="where the page goes (default: RUN_DIR/report.html; for several, report.html)"
    )


def _add_offline(commands: _Commands) -> None:
    """Add the commands that work on models without a run, and the demo."""
    for name, add_arguments, run, text in (
        ("generate", offline_arguments.add_generate_arguments, "run_generate", _GENERATE),
        ("eval", offline_arguments.add_eval_arguments, "run_eval", _EVAL),
        ("chat", offline_arguments.add_chat_arguments, "run_chat", "talk to a model in the terminal"),
        ("play", offline_arguments.add_play_arguments, "run_play", _PLAY),
        ("merge-lora", offline_arguments.add_merge_arguments, "run_merge", _MERGE),
    ):
        add_arguments(_command(commands, name, f"cli.offline:{run}", text))

    demo = _command(
        commands, "demo", "cli.demo_command:run_demo", "make a small model and a task; train it by SFT, then by GRPO"
    )
    demo.add_argument(
        "--dir", metavar="DIR", help="where everything goes (default: runs/demo, or the next free number)"
    )
    demo.add_argument("--seed", type=int, default=0, help="the same seed gives the same curve (default: %(default)s)")

    serving.add_arguments(
        _command(commands, "serve-rm", serving.run_serve_rm, "serve a reward model by HTTP, for runs with reward.url")
    )


def _add_planning(commands: _Commands) -> None:
    """Add the commands that plan a run, or measure for plans."""
    plan = _command(commands, "plan", _plan, "show where roles go, what is on which device when, and whether it fits")
    _add_config_arguments(plan)
    plan.add_argument(
        "--inventory",
        metavar="SPEC",
        help="machines to plan for: NODESxDEVICESxKIND such as 4x8xA100-80G, 2x4, 1x8x24G, 2xcpu, or pools"
        " (a=2x8xH100-80G,b=1x8x4090); with +1024G or +1T the host memory of each node, which is then checked, too;"
        " default: cluster.inventory, else as many nodes of 8 devices as it takes",
    )
    plan.add_argument("--explain", action="store_true", help="show the arithmetic behind every memory figure")
    plan_output = plan.add_mutually_exclusive_group()
    plan_output.add_argument("--json", action="store_true", help="print the whole plan as JSON instead")
    plan_output.add_argument(
        "--from",
        dest="recorded",
        metavar="RUN_DIR",
        help="also predict what overlap.staleness gains, from the costs that the RL run in this directory measured",
    )

    plan_output.add_argument(
        "--auto",
        metavar="PROFILE",
        help="instead, print the five placements of an RL run that are fastest by what `hotseat profile` measured",
    )

    profile = _command(
        commands, "profile", "cli.profile:run_profile", "measure the phases of an RL run at a few sizes, in short runs"
    )
    _add_config_arguments(profile)
    profile.add_argument("-o", "--output", metavar="FILE", default="profile.json", help="default: %(default)s")
    profile.add_argument("--sizes", metavar="FACTORS", help="batches to measure, as multiples of the config's: 0.5,1,2")
    profile.add_argument(
        "--tensor-parallel", metavar="SIZES", help="sizes of engines to measure, such as 1,2; default: the config's"
    )

    explain = _command(commands, "explain", _explain, "show the batch algebra: prompts, samples, steps, micro-batches")
    _add_config_arguments(explain)
    explain.add_argument("--inventory", metavar="SPEC", help="machines, as for `hotseat plan`")
    explain.add_argument(
        "--num-rows", type=int, metavar="N", help="rows of the data set; default: data.max_samples, which bounds it"
    )


def _command(commands: _Commands, name: str, run: object, text: str) -> argparse.ArgumentParser:
    """Add a command. run: its function; or module:function, of a module to load when the command runs."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=help_texts.EPILOGS[name],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def _what_may_change() -> str:
    """List what may change when a run resumes, for the end of `hotseat resume --help`."""
    import textwrap

    from hotseat.config.changes import may_change

    lines = ["what may change, and changes from the next step on:"]
    for subject, keys in may_change():
        text = f"{subject}: {', '.join(keys)}"
        lines += textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
    return "\n".join([*lines, help_texts.CHANGES])


def _add_config_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", metavar="CONFIG", help="YAML file")
    offline_arguments.add_overrides(command, "settings that replace the file's, such as rollout.top_p=0.9")


def _run(arguments: argparse.Namespace) -> int:
    from hotseat.config import load

    config = load(arguments.config, [*arguments.overrides, *_allowing(arguments.allow_change)])
    from hotseat.loop.start import start

    start(config)
    return OK


def _allowing(keys: Sequence[str]) -> list[str]:
    return [f"checkpoint.allow_changes=[{', '.join(keys)}]"] if keys else []


def _resume(arguments: argparse.Namespace) -> int:
    from hotseat.config import loads_saved
    from hotseat.config.store_urls import is_store_url

    if is_store_url(arguments.run_dir):
        return _resume_from(arguments.run_dir, arguments)
    path = Path(arguments.run_dir)
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path} holds no run: there is no {path / 'config.yaml'}")
    here = [f"run_dir={path.parent}", f"name={path.name}", "checkpoint.resume=true"]
    here += _allowing(arguments.allow_change)
    config = loads_saved((path / "config.yaml").read_text(), [*arguments.overrides, *here])
    from hotseat.loop.state.checkpoints import CheckpointStore
    from hotseat.loop.state.memory_snapshots import folder_of

    folder = Path(config.checkpoint.folder or path / "checkpoints")
    is_elsewhere = config.checkpoint.url is not None  # where the run itself looks
    uses_memory = config.checkpoint.memory_every is not None
    in_memory = folder_of(path, Path(config.checkpoint.memory_path)) if uses_memory else None
    steps = [step for each in (folder, in_memory) if each is not None for step in CheckpointStore(each).steps()]
    if not (is_elsewhere or steps or kept_driver.restarts):
        model = Path(config.checkpoint.export_path or path / "model")
        further = f", or from its model (actor.model={model})" if (model / "config.json").is_file() else ""
        raise UserError(
            f"{path} has no checkpoint to resume from: {folder} holds none. Start it again with `hotseat run`, under"
            f" another name if it made a step{further}; checkpoint.every=1 makes a checkpoint after each step"
        )
    from hotseat.loop.start import start

    start(config)
    return OK


def _resume_from(url: str, arguments: argparse.Namespace) -> int:
    """Resume a run on any machine, from its newest checkpoint at a URL."""
    from hotseat.config import loads_saved
    from hotseat.config.store_urls import store_url_problem
    from hotseat.loop.state.remote_checkpoints import newest_state
    from hotseat.loop.state.run_dir import folder_of_remote

    if (problem := store_url_problem(url)) is not None:
        raise UserError(problem)
    state = newest_state(url)
    if state is None:
        raise UserError(f"{url} holds no checkpoint to resume from: give what was checkpoint.path in the run")
    here = [f"checkpoint.path={json.dumps(url)}", "checkpoint.resume=true", *_allowing(arguments.allow_change)]
    config = loads_saved(str(state["config"]), [*arguments.overrides, *here])
    path = folder_of_remote(config, state)
    print(f"resuming {url} in {path}")
    from hotseat.loop.start import start

    start(config.model_copy(update={"name": path.name}))
    return OK


def _report(arguments: argparse.Namespace) -> int:
    from hotseat.observe.report import write_report

    run_dirs = [Path(run_dir) for run_dir in arguments.run_dirs]
    default = run_dirs[0] / "report.html" if len(run_dirs) == 1 else Path("report.html")
    print(write_report(run_dirs, Path(arguments.output) if arguments.output else default))
    return OK


def _plan(arguments: argparse.Namespace) -> int:
    from hotseat.cli.plan_view import make_console, notes, render
    from hotseat.config import load
    from hotseat.config.unsupported import unsupported
    from hotseat.planning.advisor import advise
    from hotseat.planning.config_plan import flow_problem, make_plan, on_all_devices, with_budgets

    config = load(arguments.config, arguments.overrides)
    if arguments.auto is not None:
        from hotseat.cli.auto_view import print_auto

        print_auto(config, arguments.inventory, Path(arguments.auto), make_console())
        return OK
    if arguments.recorded is not None:
        from hotseat.cli.forecast_view import check_recorded, print_forecast

        recorded = check_recorded(config, Path(arguments.recorded))
    placed = on_all_devices(config, arguments.inventory)
    chosen = with_budgets(placed, arguments.inventory)
    made = make_plan(chosen.config, arguments.inventory)
    for key, what in unsupported(chosen.config):
        print(f"planned, but this run cannot start yet: {key}: not part of this version: {what}", file=sys.stderr)
    if (problem := flow_problem(chosen.config)) is not None:
        print(f"planned, but no run can follow it: flow: {problem}", file=sys.stderr)
    if arguments.json:
        print(made.to_json())
    else:
        advice = functools.partial(advise, config, arguments.inventory)
        render(made, make_console(), arguments.explain, advice, notes(config, placed, chosen, made))
    if arguments.recorded is not None:
        print_forecast(chosen.config, made, recorded, Path(arguments.recorded), make_console())
    return REFUSED if made.verdict == "does_not_fit" else OK


def _explain(arguments: argparse.Namespace) -> int:
    from hotseat.checks.named_files import num_rows_of
    from hotseat.config import load
    from hotseat.config.batches import batch_algebra, explain
    from hotseat.planning.config_plan import make_plan, num_data_parallel, on_all_devices, with_budgets

    config = on_all_devices(load(arguments.config, arguments.overrides), arguments.inventory)
    if arguments.num_rows is not None and arguments.num_rows < 1:
        raise UserError(f"--num-rows {arguments.num_rows}: must be at least 1")
    chosen = with_budgets(config, arguments.inventory)
    config = chosen.config if chosen.is_priced else config
    num_ranks = num_data_parallel(config, make_plan(config, arguments.inventory))
    algebra = batch_algebra(config, num_ranks, arguments.num_rows or num_rows_of(config))
    rows = explain(algebra, config)
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    print(f"task {config.task}, {num_ranks} data-parallel rank{'s' * (num_ranks > 1)}")
    for what, number, how in rows:
        print(f"{what:<{widths[0]}}  {number:>{widths[1]}}  {how}")
    return OK


def _config(arguments: argparse.Namespace) -> int:
    from hotseat.checks.pipeline import startup_problems
    from hotseat.checks.stage import Unsupported
    from hotseat.config import load, to_yaml

    config = load(arguments.config, arguments.overrides)
    print(to_yaml(config), end="")
    for problem in startup_problems(config):
        text = f"to start this run: {problem}"
        if isinstance(problem, Unsupported):
            text = f"this run cannot start yet: {problem.key}: not part of this version: {problem.message}"
        print(text, file=sys.stderr)
    return OK


def _options(arguments: argparse.Namespace) -> int:
    import shutil

    from hotseat.cli.options_view import render, render_json

    width = shutil.get_terminal_size((120, 24)).columns
    print(render_json(arguments.section) if arguments.json else render(arguments.section, width))
    return OK


def _shim_path(framework: str, arguments: argparse.Namespace) -> int:
    print(pkgutil.resolve_name(f"hotseat.{framework}.shim:DIRECTORY"))
    return OK


if __name__ == "__main__":
    entry()
