"""Texts of `--help` below the arguments of each command: examples, the syntax of settings, exit codes."""

from __future__ import annotations

EXIT_CODES = """\
exit codes:
  0    done
  1    failed while running
  2    refused before anything ran: a wrong key, value, file or command line
  130  stopped by Ctrl-C or SIGTERM (the first lets the step finish and saves it, a second ends at once)"""

RUN_EXIT_CODES = f"""\
{EXIT_CODES}
  75   died more often than run.max_restarts allows without a new checkpoint: a scheduler should queue it again"""

CHANGES = """
Everything else is refused unless --allow-change names it. With another number of steps the learning
rate follows the schedule of the new length. Reports mark where a run was changed."""

_SETTINGS = """\
settings:
  KEY=VALUE replaces a setting of the file: sections are joined by dots, the value is YAML, such as
  rollout.temperature=0.8, eval=null or 'cluster.component_placement={actor: all}' (in quotes for the shell).
  `hotseat options` lists every key, its values, its default and its meaning."""

_PLAN_CODES = """\
exit codes: 0 it fits, or its memory is not known; 2 it does not fit, or the config is refused"""

MAIN = f"""\
first steps:
  hotseat new rl first && cd first     write a config, data, a reward and a tiny model
  hotseat run rl.yaml                  train; everything goes to runs/rl-1
  hotseat report runs/rl-1             write runs/rl-1/report.html
  hotseat run rl.yaml name=hot rollout.temperature=1.2    the same with another setting, in runs/hot

`hotseat COMMAND --help` describes a command. Configs are YAML; `hotseat options` lists every key.
OpenRLHF's commands are modules: `python -m hotseat.cli.train_ppo_ray --help`, also train_sft, train_rm,
train_dpo, serve_rm, batch_inference and lora_combiner.

{EXIT_CODES}"""

EPILOGS = {
    "new": """\
examples:
  hotseat new rl first          GRPO: first/rl.yaml, reward.py, prompts.jsonl, held_out.jsonl and tiny_model
  hotseat new sft               supervised fine-tuning, in the current folder

Then `hotseat run rl.yaml` in that folder. No file that is there already is overwritten.""",
    "run": f"""\
examples:
  hotseat run rl.yaml
  hotseat run rl.yaml name=long train.num_episodes=20 checkpoint.every=50

{_SETTINGS}
  name=NAME is the run's name: its files go to runs/NAME (run_dir=DIR changes runs). Without it the name is the task
  and the first number that is free, such as rl-1. The name of another run that has made steps is refused.

see also: `hotseat config CONFIG` checks a config without running it; `hotseat plan CONFIG` shows whether it fits into
memory.

{RUN_EXIT_CODES}""",
    "check": """\
examples:
  hotseat check                   packages, devices and limits of this machine, and how to fix what fails
  hotseat check rl.yaml           the same, and whether this run could start
  RAY_ADDRESS=10.0.0.1:6379 hotseat check --cluster /shared/me
                                  links, sums and short runs over all nodes and devices, in some minutes

The exit code is 2 if something would stop every run.""",
    "launch": """\
examples:
  hotseat launch slurm rl.yaml --nodes 2 --gpus-per-node 8 --setup "source .venv/bin/activate" > job.sh
  hotseat launch slurm rl.yaml --nodes 2 --gpus-per-node 8 --sbatch=--time=24:00:00 --sbatch=--partition=gpu | sbatch

The script starts Ray on all nodes, and the run on the first. Before the time limit the run saves its step; the job is
queued again and resumes. docs/multi-node.md has more.""",
    "resume": """\
examples:
  hotseat resume runs/rl-1
  hotseat resume runs/rl-1 actor.optimizer.learning_rate=5e-7 train.num_episodes=20
  hotseat resume s3://bucket/rl-1               on any machine: its checkpoint.path, of which the newest is downloaded

KEY=VALUE is written as for `hotseat run`; without any, the run ends as if it had never been interrupted.
""",
    "status": """\
examples:
  hotseat status runs/rl-1
  hotseat status runs/rl-1 --json
  hotseat status runs/rl-1 > /dev/null || hotseat resume runs/rl-1

Everything is read from RUN_DIR, which may be on a disk that another machine writes to.

exit codes:
  0    it runs and makes progress, or is finished: nothing is to be done
  1    the status could not be read
  2    RUN_DIR holds no run
  3    stuck: it runs, and has made no progress for longer than it may
  4    stopped by Ctrl-C or SIGTERM
  5    failed: it ended with an error
  6    died: killed, or its machine was lost
  7    unknown: no process of it runs here, and it has left no sign of life""",
    "diagnose": """\
examples:
  hotseat diagnose runs/rl-1
  hotseat diagnose runs/rl-1 --json
  hotseat diagnose runs/rl-1 --try                        the cure of the first cause, in runs/rl-1-try-1
  hotseat diagnose runs/rl-1 --try algorithm.kl.coef=0.01 --steps 50

Causes are in the order of likelihood: the ones that began first, then what they bring about. docs/diagnosing.md lists
the rules. Everything is read from RUN_DIR, during the run, too, and nothing is written there.

exit codes:
  0    healthy: no rule fires, and it did not fail; with --try: the cure helped
  1    the records could not be read
  2    RUN_DIR holds no run
  3    there is a likely cause, or it failed; with --try: the cure did not help""",
    "replay": """\
examples:
  hotseat replay runs/rl-1                      the same weights, bit for bit, in runs/rl-1-replay-1
  hotseat replay runs/rl-1 algorithm.clip_low=0.1
  hotseat replay runs/rl-1 --from-step 40 --to-step 44 --evaluate

Groups come from RUN_DIR/rollouts in the recorded order, so nothing is sampled or scored to learn from. Exit code 1: the
weights at its end are not those of the recorded run.
""",
    "ledger": """\
examples:
  hotseat ledger runs/rl-1
  hotseat ledger runs/rl-1 --sample 0/17/3      pass 0 over the data, prompt 17, answer 3""",
    "report": """\
examples:
  hotseat report runs/rl-1                      writes runs/rl-1/report.html
  hotseat report runs/rl-1 runs/rl-2            writes report.html, which compares the two

The page is one file and opens without a server; `hotseat run` writes it at its end, too. It can also be written while
the run is still training.""",
    "generate": f"""\
examples:
  hotseat generate tiny_model prompts.jsonl data.apply_chat_template=true --max-new-tokens 8
  hotseat generate runs/rl-1/model prompts.jsonl --config rl.yaml --reward reward.py -n 8 --keep best
  hotseat generate runs/rl-1/model prompts.jsonl --config rl.yaml -n 8 --keep pairs --output pairs.jsonl

A line has the prompt as `input`, the answer as `output`, and its reward, if there is one. A command that was stopped or
killed resumes when it is repeated: answers are kept in FILE.partial until all are there.

{EXIT_CODES}""",
    "eval": f"""\
examples:
  hotseat eval runs/rl-1/model held_out.jsonl --config rl.yaml --output eval/rl-1
  hotseat eval tiny_model held_out.jsonl data.label_key=label --reward exact_match -n 16 --temperature 1

An answer with a reward of 1 or more is right. DIR gets answers.jsonl, metrics.jsonl and report.html; `hotseat report`
compares several such folders. A command that was stopped or killed resumes when it is repeated.

{EXIT_CODES}""",
    "chat": """\
example:
  hotseat chat runs/sft-1/model --temperature 0.7 --max-new-tokens 256

Answers appear when they are complete. The model's chat template is used, or data.chat_template.""",
    "play": f"""\
examples:
  hotseat play rl.yaml --prompt 3
  hotseat play rl.yaml --prompt 3 --model runs/rl-1/model rollout.temperature=0.5

For debugging an agent: what the policy reads and samples is shown request by request, then the reward. The episode is
the one that a run of this config samples first for the prompt.

{EXIT_CODES}""",
    "merge-lora": """\
example:
  hotseat merge-lora runs/sft-1/adapter merged --base tiny_model""",
    "demo": """\
example:
  hotseat demo --dir runs/demo                  about two minutes on two CPU cores""",
    "serve-rm": """\
examples:
  hotseat serve-rm reward_model                 then reward.url=http://127.0.0.1:5000/get_reward in a run
  HOTSEAT_REWARD_TOKEN=... hotseat serve-rm reward_model --host 0.0.0.0 --port 8000

It answers OpenRLHF's requests (query, prompts, labels) and scores the texts of concurrent ones together. GET /health
and GET /metrics (Prometheus) tell how it is. Ctrl-C or SIGTERM stops it once the open requests are answered.""",
    "push": f"""\
examples:
  hotseat push runs/rl-1                        to the run's checkpoint.push_to_hub
  hotseat push runs/rl-1 --repo me/sums --public

The token is that in HF_TOKEN, and has to be one that may write. Pushed are the files of the exported model, and a card
(README.md) with base model, task, data, settings, last metrics and versions. HF_ENDPOINT names another hub.

{EXIT_CODES}""",
    "plan": f"""\
examples:
  hotseat plan rl.yaml --inventory 1x8xH100-80G
  hotseat plan rl.yaml --inventory 2x8xH100-80G rollout.engine=vllm --explain
  hotseat plan rl.yaml --from runs/rl-1        what overlap.staleness would gain, by the costs which that run measured
  hotseat plan rl.yaml --auto profile.json     the fastest placements, by what `hotseat profile` measured

No GPU is needed. The output begins with whether the run fits into memory. If it does not, it shows settings with which
it does, as YAML to paste.

{_SETTINGS}

{_PLAN_CODES}""",
    "explain": f"""\
example:
  hotseat explain rl.yaml rollout.samples_per_prompt=16

{_SETTINGS}""",
    "config": f"""\
examples:
  hotseat config rl.yaml
  hotseat config rl.yaml rollout.engine=vllm > vllm.yaml

Anything that would keep the run from starting is printed to standard error.

{_SETTINGS}""",
    "options": """\
examples:
  hotseat options                               every key
  hotseat options rollout                       the keys below rollout
  hotseat options | grep -A1 learning_rate

A key is listed as `key: values = default`, its meaning below it. In a file sections are nested, in arguments they are
joined by dots: `rollout.top_p=0.9` is `rollout: {top_p: 0.9}`.""",
    "openrlhf-path": """\
example:
  hotseat openrlhf-path                         the directory, for PYTHONPATH

After `export PYTHONPATH=$(hotseat openrlhf-path)${PYTHONPATH:+:$PYTHONPATH}` the command
`python -m openrlhf.cli.train_ppo_ray` and OpenRLHF's other commands run on Hotseat, so that scripts which name them
need no change. For `ray job submit` the variable goes into the runtime environment, as
--runtime-env-json='{"env_vars": {"PYTHONPATH": "DIRECTORY"}}', followed by a colon and what it has there already. Where
OpenRLHF itself can be imported, the commands are refused.""",
    "verl-path": """\
example:
  hotseat verl-path                             the directory, for PYTHONPATH

After `export PYTHONPATH=$(hotseat verl-path)${PYTHONPATH:+:$PYTHONPATH}` the command
`python -m verl.trainer.main_ppo` runs on Hotseat, so that scripts which name it need no change. Where verl itself can
be imported, the command is refused.""",
    "rlinf-path": """\
example:
  hotseat rlinf-path                            the directory, for PYTHONPATH

After `export PYTHONPATH=$(hotseat rlinf-path)${PYTHONPATH:+:$PYTHONPATH}` RLinf's script `train_embodied_agent.py` runs
on Hotseat as it is; it needs `pip install 'hotseat[rlinf]'`. Where RLinf itself can be imported, imports are
refused.""",
    "profile": """\
examples:
  hotseat profile run.yaml                                writes profile.json
  hotseat profile run.yaml --sizes 0.5,1,2 --tensor-parallel 1,2

Each size is a run of four synchronous steps in a temporary directory; the first step does not count. With the file,
`hotseat plan run.yaml --auto profile.json` prints the fastest placements, as YAML to paste.""",
    "rlinf-config": """\
examples:
  hotseat rlinf-config grpo-1.5b.yaml > mine.yaml         then `hotseat run mine.yaml`
  hotseat rlinf-config grpo-1.5b.yaml reward.function=reward.py

RLinf's keys that have no effect here are listed on standard error, each with the reason; docs/rlinf.md has a table.""",
    "completion": """\
example:
  eval "$(hotseat completion bash)"             in ~/.bashrc; likewise for zsh""",
}
