"""The draft of a config, and what several flags together say about the roles of its run."""

from __future__ import annotations

from dataclasses import dataclass, field

from hotseat.cli.translation import CommandDraft
from hotseat.errors import Problem
from hotseat.openrlhf.argv import CommandLine


@dataclass
class ConfigDraft(CommandDraft):
    """The draft of a command of OpenRLHF."""

    line: CommandLine
    task: str = field(kw_only=True)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)  # environment variables

    def named(self, name: str) -> str:
        return self.line.spelling(name)

    def number_from(self, variable: str) -> int | None:
        """Read a count from an environment variable; note a problem if it is none. (OpenRLHF fails on it later.)"""
        text = self.env.get(variable, "").strip()
        if not text:
            return None
        if not text.isascii() or not text.isdecimal() or int(text) < 1:
            self.problems.append(Problem(variable, f"given {text!r}, must be a whole number of at least 1"))
            return None
        return int(text)


# --- roles ------------------------------------------------------------------------------------------------------------


def has_critic(line: CommandLine) -> bool:
    return bool(line["--advantage_estimator"] == "gae")


def no_critic(draft: ConfigDraft) -> str:
    return f"{draft.named('--advantage_estimator')} is {draft.line['--advantage_estimator']}, which has no critic"


def has_reference(line: CommandLine) -> bool:
    return bool(line["--init_kl_coef"] > 0)


def reward_source(line: CommandLine) -> str | None:
    """Return the flag that decides where rewards come from: an agent, else a remote source, else a model."""
    names = ("--agent_func_path", "--remote_rm_url", "--reward_pretrain")
    return next((name for name in names if line[name]), None)


def has_reward_model(line: CommandLine) -> bool:
    """Return whether there is a reward model. One whose size is set but not its name is planned too."""
    is_sized = line.has("--reward_num_nodes") or line.has("--reward_num_gpus_per_node")
    source = reward_source(line)
    return source == "--reward_pretrain" or (source is None and is_sized)


def engine_of(line: CommandLine) -> str:
    """Return the engine. `--vllm_num_engines 0` is OpenRLHF's way to sample without vLLM."""
    if not line.has("--engine") and line["--vllm_num_engines"] == 0:
        return "transformers"
    return str(line["--engine"])


def shares_with_rollout(line: CommandLine) -> bool:
    """Return whether engines are on the actor's devices: by a flag, or because no engines are requested."""
    return not line["--vllm_num_engines"] or bool(line["--colocate_all_models"] and not line["--async_train"])
