"""kill -9 while programs play the episodes: no bit changes, and nothing that they started is left."""

import json
import sys

import pytest
from fault_cases import MARK, Faulty, differences, make_faulty_task, run_undisturbed

from hotseat.faults import Fault

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"

# Two requests at once and one after them, and a process that would stay for ever.
PROGRAM = """
import json, os, subprocess, sys, urllib.request
from concurrent.futures import ThreadPoolExecutor
task = json.loads(sys.stdin.readline())
subprocess.Popen(["sleep", "10000"])
def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "x", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
first = [{"role": "user", "content": task["prompt"]}]
with ThreadPoolExecutor(2) as threads:
    answers = list(threads.map(ask, [first, first + first]))
last = ask([*first, answers[0], {"role": "user", "content": "+"}])
json.dump({"reward": last["content"].count("7")}, open(os.environ["HOTSEAT_RESULT"], "w"))
"""


@pytest.mark.parametrize("num_episodes", [8, 200])  # of a step
def test_a_driver_and_then_a_host_die_while_programs_play_and_no_bit_changes(tmp_path, num_episodes):
    task = make_faulty_task(tmp_path)
    (task / "program.py").write_text(PROGRAM)
    overrides = [
        f"agent.command={json.dumps([sys.executable, str(task / 'program.py')])}",
        f"agent.pass_env=[{MARK}]",
        f"data.chat_template={json.dumps(TEMPLATE)}",
        "data.max_length=24",
        "reward.function=null",
        f"rollout.samples_per_prompt={num_episodes // 4}",
        f"agent.max_concurrent={num_episodes}",
        f"train.batch_size={num_episodes}",
    ]
    undisturbed = run_undisturbed(task, num_passes=2, overrides=overrides)
    with Faulty(task, num_passes=2, overrides=overrides) as run:
        run.arm(Fault("update.before", "kill", skip=1))
        code, _, errors = run.go()
        assert code == -9, errors[-3000:]
        assert run.is_gone(within_s=60)
        run.arm(Fault("group.first", "kill", by="agents:0", skip=1))
        code, out, errors = run.go()
        assert code == 0, errors[-3000:]
        assert run.all_happened()
        assert "resuming from" in out
        assert "rollout host 0 died and is replaced" in out
        assert differences(undisturbed, run.run_dir) == []
        assert run.is_gone(within_s=60)
