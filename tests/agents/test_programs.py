"""Programs as agents: any command that asks an OpenAI endpoint and writes a result."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from chat_templates import tokenizer_of
from gateway_cases import KEY, SAMPLING, WAIT_S, Engine, Outcome, learned, processes_of

from hotseat.agents import AgentHost, ProgramSettings, load_agent, programs
from hotseat.agents.agent_file import load_file
from hotseat.agents.confinement import (
    Confinement,
    best_confinement,
    namespaces,
    warn_if_open,
    works,
)
from hotseat.agents.programs import ProgramHost, check_startable, environment
from hotseat.errors import UserError
from hotseat.processes import supervisor
from hotseat.processes.supervisor import own_group
from hotseat.types import Episode, Failed, Prompt, SampleKey, ScoredEpisode

pytestmark = pytest.mark.slow

# What a program does without any library: one chat completion.
ASK = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "x", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
def write(text):
    open(os.environ["HOTSEAT_RESULT"], "w").write(text)
"""


def run(tmp_path: Path, code: str, engine: Engine | None = None, timeout_s: float = WAIT_S, **settings: Any) -> Outcome:
    """One episode that a program plays."""
    file = tmp_path / "program.py"
    file.write_text(ASK + textwrap.dedent(code))
    programs = ProgramSettings(command=(sys.executable, str(file)), **settings)
    agent = load_agent(None, tokenizer_of("smollm2"), max_length=600, programs=programs)
    with AgentHost(agent, engine or Engine(), run_seed=5, timeout_s=timeout_s) as host:
        return host.submit(Prompt(3, "bad?", (1,), "7"), KEY, SAMPLING).result(WAIT_S)


def reason(outcome: Outcome) -> str:
    assert isinstance(outcome, Failed), outcome
    return outcome.reason.partition("sample 0/3/1: ")[2]


def test_a_program_gets_its_task_plays_two_turns_and_writes_its_reward(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("FOR_PROGRAMS", "given")
    code = """
        assert (task["prompt"], task["label"]) == ("bad?", "7") and type(task["seed"]) is int, task
        assert "WANDB_API_KEY" not in os.environ and os.environ["FOR_PROGRAMS"] == "given"
        assert os.listdir() == [] and os.environ["HOME"] == os.getcwd()
        messages = [{"role": "user", "content": task["prompt"]}]
        for _ in range(2):
            messages += [ask(messages), {"role": "user", "content": "more"}]
        write(json.dumps({"reward": 0.5, "extra": {"turns": 2}}))
    """
    engine = Engine("cab", "dad")
    outcome = run(tmp_path, code, engine, passed_on=("FOR_PROGRAMS",))
    assert isinstance(outcome, ScoredEpisode), outcome
    assert (outcome.reward, outcome.extra) == (0.5, {"turns": 2.0})
    [segment] = outcome.episode.segments
    assert learned((segment,), outcome.episode.turn_lengths) == engine.sampled


def test_without_a_reward_in_its_result_the_run_scores(tmp_path):
    question = '[{"role": "user", "content": "q"}]'
    assert isinstance(run(tmp_path, f"ask({question}); write('{{}}')"), Episode)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('no luck'); sys.exit(3)", "the program ended with exit code 3: no luck"),
        ("os.kill(os.getpid(), 9)", "the program ended with signal 9"),
        ("print('done')", "the program did not write its result to the file $HOTSEAT_RESULT; it wrote: done"),
        ("write('x')", "the result file is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("write('[1]')", "the result file has a list, neither an object nor a number"),
        ("write('NaN')", "the result file has the number nan"),
        ("write(' ' * (1 << 21))", "the result file has more than 1 MiB"),
        (
            "os.symlink('/dev/zero', os.environ['HOTSEAT_RESULT'])",
            "the result file cannot be read: Too many levels of symbolic links",
        ),
        ("os.mkfifo(os.environ['HOTSEAT_RESULT'])", "the result file is not a file"),
        ("write('1')", "the program asked the policy for nothing, so there is nothing to learn from"),
    ],
)  # fmt: skip
def test_a_program_that_fails_is_a_failed_sample_with_its_reason(tmp_path, code, expected):
    assert reason(run(tmp_path, code)) == expected


def test_what_a_program_started_ends_with_it(tmp_path, monkeypatch):
    """Also at the deadline, with a program that would never end."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    child = (
        "import subprocess; child = subprocess.Popen(['sleep', '1000']);"
        " open({!r}, 'w').write(os.readlink(f'/proc/{{child.pid}}/cwd'))"
    )
    ended, late = tmp_path / "ended", tmp_path / "late"
    assert reason(run(tmp_path, child.format(str(ended)))).startswith("the program did not write")
    hangs = child.format(str(late)) + "; child.wait()"
    for timeout_s in (2.0, 10.0, 60.0):  # on a busy machine it has not begun after two seconds
        assert reason(run(tmp_path, hangs, timeout_s=timeout_s)) == f"the agent took longer than {timeout_s:g} s"
        if late.exists() and late.read_text():
            break
    # By their folders: the numbers that a program sees may be those of its namespace.
    for file in (ended, late):
        assert file.read_text().startswith(str(tmp_path))
    wait_until_none_works_in(tmp_path)


def test_a_program_that_never_stops_writing_ends_at_its_deadline(tmp_path):
    writes = "import sys\nwhile True: sys.stdout.write('x' * 4096)"
    assert reason(run(tmp_path, writes, timeout_s=2.0)) == "the agent took longer than 2 s"


def wait_until_none_works_in(folder: Path) -> None:
    """Wait for processes to end. One that has ended works nowhere, even if nobody reaps it."""
    deadline = time.monotonic() + WAIT_S
    while left := processes_of(folder):
        assert time.monotonic() < deadline, left
        threading.Event().wait(0.01)


# --- what programs start ----------------------------------------------------------------------------------------------

DAEMON = """
import os, subprocess, sys
child = subprocess.Popen(['sleep', '1000'], start_new_session=True, env={'PATH': os.environ['PATH']})
marked = subprocess.Popen(['sleep', '1000'], start_new_session=True)
os.makedirs('locked/inner'); open('locked/inner/file', 'w').close(); os.chmod('locked/inner', 0); os.chmod('locked', 0)
open('started', 'w').write(' '.join(sorted(os.listdir('/proc/self/ns'))))
"""


def confinement_of(name: str) -> Confinement:
    """One of the ways, if it works on this system."""
    if name == "process group":
        return Confinement(name)
    if name == "control group":
        group = own_group()
        found = [] if isinstance(group, str) else [Confinement(name, groups=group[0])]
    else:
        found = [Confinement("PID namespace", prefix) for prefix in namespaces() if prefix[0].endswith(name)]
    for confinement in filter(works, found):
        return confinement
    pytest.skip(f"this system allows no {name}")


# Prints whether it finds a text in the environment of any process that it sees, and how many it sees.
SEARCHES = """
import os, subprocess
subprocess.run(['umount', '/proc'], stderr=subprocess.DEVNULL)
seen = [name for name in os.listdir('/proc') if name.isdigit()]
def environ(pid):
    try:
        return open(f'/proc/{pid}/environ', 'rb').read()
    except OSError:
        return b''
print(any(b'hun' + b'ter2' in environ(pid) for pid in seen), len(seen) < 8)
"""


@pytest.mark.parametrize("name", ["unshare", "bwrap"])
def test_a_program_cannot_read_the_environment_of_its_hosts_processes(name, tmp_path):
    programs = ProgramHost(confinement=confinement_of(name))
    secret = subprocess.Popen(["sleep", "1000"], env={"API_KEY": "hunter2"})

    async def main():
        async with programs.folder() as folder:
            return await programs.run([sys.executable, "-c", SEARCHES], folder, environment(folder, (), {}), b"")

    try:
        assert asyncio.run(main()) == (0, "False True")
    finally:
        secret.kill()
        secret.wait()
        programs.close()


def test_where_namespaces_work_programs_run_in_one_unless_they_start_containers():
    if any(works(Confinement("PID namespace", prefix)) for prefix in namespaces()):
        assert best_confinement().hides_processes
    assert not best_confinement(has_containers=True).hides_processes


def test_namespaces_can_be_switched_off(monkeypatch, caplog):
    monkeypatch.setenv("HOTSEAT_CONFINE", "0")
    confinement = best_confinement.__wrapped__()
    assert not confinement.hides_processes
    warn_if_open.__wrapped__(confinement, False)
    assert "since HOTSEAT_CONFINE is 0" in caplog.text


def test_programs_that_are_not_confined_are_said_to_be_so_once(caplog):
    warn_if_open.cache_clear()
    for _ in range(2):
        warn_if_open(Confinement("process group"), False)
        warn_if_open(Confinement("PID namespace", ("bwrap",)), False)
    assert caplog.text.count("programs are not confined: they can read the environment of this user's processes") == 1
    assert "install bubblewrap" in caplog.text
    warn_if_open(Confinement("control group", groups=Path("/")), True)
    assert "since agent.containers is set" in caplog.text


@pytest.mark.parametrize("name", ["control group", "unshare", "bwrap", "process group"])
def test_a_signal_that_a_program_sends_itself_ends_it_and_nothing_is_added_to_its_output(name):
    programs = ProgramHost(confinement=confinement_of(name))
    code = "import os; print('before', flush=True); os.kill(os.getpid(), 15); os._exit(3)"

    async def main():
        async with programs.folder() as folder:
            return await programs.run([sys.executable, "-c", code], folder, environment(folder, (), {}), b"")

    try:
        assert asyncio.run(main()) == (-15, "before")
    finally:
        programs.close()


@pytest.mark.parametrize("name", ["control group", "unshare", "bwrap", "process group"])
def test_what_a_program_started_ends_with_it_whatever_session_it_is_in(name, tmp_path, monkeypatch):
    confinement = confinement_of(name)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    programs = ProgramHost(confinement=confinement)

    async def main():
        async with programs.folder() as folder:
            code, written = await programs.run([sys.executable, "-c", DAEMON], folder, dict(os.environ), b"")
            assert code == 0, written
            assert (folder / "started").exists()
            # In a namespace they end with the program itself; elsewhere they are left, to be found.
            assert confinement.kind == "PID namespace" or processes_of(tmp_path)
        return folder

    folder = asyncio.run(main())
    assert not folder.exists()
    if confinement.kind == "process group":  # one of them hides: it has removed the mark
        while len(left := processes_of(tmp_path)) > 1:  # the other's folder is gone a moment after its mark
            threading.Event().wait(0.01)
        [hidden] = left
        os.kill(hidden, signal.SIGKILL)
    while processes_of(tmp_path):
        threading.Event().wait(0.01)
    programs.close()
    assert os.listdir(tmp_path) == []


def test_what_has_left_its_confinement_is_found_by_its_mark(tmp_path, monkeypatch):
    """Here by a stand-in for one, which holds nothing back."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    programs = ProgramHost(confinement=Confinement("PID namespace", (shutil.which("env"),)))
    leaves = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"

    async def main():
        async with programs.folder() as folder:
            code, written = await programs.run([sys.executable, "-c", leaves], folder, dict(os.environ), b"")
            assert code == 0, written
            assert processes_of(tmp_path)

    asyncio.run(main())
    wait_until_none_works_in(tmp_path)
    programs.close()


def test_a_control_group_that_cannot_be_killed_as_a_whole_is_not_used(tmp_path):
    assert not works(Confinement("control group", groups=tmp_path))
    assert os.listdir(tmp_path) == []


HOST = """
import asyncio, os, sys, types
agents = sys.modules['hotseat.agents'] = types.ModuleType('hotseat.agents')  # without torch, which takes seconds
agents.__path__ = [sys.argv[3]]
from hotseat.agents.programs import ProgramHost

async def main():
    programs = ProgramHost()
    async def one(at):
        async with programs.folder() as folder:
            program = "import os, subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True);"
            program += f"open({sys.argv[1]!r} + '/began.{at}', 'w').close(); os.system('sleep 1000')"
            await programs.run([sys.executable, '-c', program], folder, dict(os.environ), b'')
    await asyncio.gather(*map(one, range(int(sys.argv[2]))))

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [3, pytest.param(200, marks=pytest.mark.long)])
def test_programs_of_a_host_that_was_killed_end_and_their_folders_are_removed(tmp_path, number):
    began, folders = tmp_path / "began", tmp_path / "folders"
    began.mkdir()
    folders.mkdir()
    env = {**os.environ, "TMPDIR": str(folders)}
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(began), str(number), str(Path(programs.__file__).parent)], env=env
    )
    beat = threading.Event()
    while len(os.listdir(began)) < number:
        assert host.poll() is None
        beat.wait(0.01)
    assert processes_of(folders)
    host.kill()
    host.wait()
    while processes_of(folders) or os.listdir(folders):
        beat.wait(0.01)


def test_locked_folders_are_removed_also_without_the_rights_of_root(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and folder != Path("/") and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    mine = tmp_path / "mine"
    mine.mkdir()
    os.chown(mine, 65534, 65534)
    code = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]); import supervisor\n"
        "folder = Path(sys.argv[1]) / 'folder'; (folder / 'locked/inner').mkdir(parents=True)\n"
        "(folder / 'locked/inner/file').touch(); (folder / 'locked/link').symlink_to('/')\n"
        "(folder / 'locked/inner').chmod(0o500); (folder / 'locked').chmod(0); folder.chmod(0o500)\n"
        "supervisor.remove_folder(folder); sys.exit(folder.exists())"
    )
    package = tmp_path / "package"
    package.mkdir()
    shutil.copy(supervisor.__file__, package / "supervisor.py")
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip("needs a Python that other users may run")
    assert subprocess.run([python, "-c", code, str(mine), str(package)], user=65534, group=65534).returncode == 0


def test_containers_with_the_label_of_an_episode_are_removed(tmp_path, monkeypatch):
    """Here by a stand-in for podman, which keeps containers as files."""
    engine = tmp_path / "engine"
    engine.write_text(
        f"#!/bin/sh\ncd {tmp_path}/containers\ncase $1 in\n"
        '  ps) grep -l -- "${5#label=}" * ;;\n  rm) shift 3; rm -- "$@" ;;\nesac\n'
    )
    engine.chmod(0o755)
    (tmp_path / "containers").mkdir()
    (tmp_path / "containers" / "other").write_text("hotseat.episode=other.1\n")
    programs = ProgramHost(str(engine))
    run = "import os, shutil; shutil.copy(os.environ['HOTSEAT_LABEL_FILE'], {!r})"

    async def main():
        async with programs.folder() as folder:
            code = run.format(str(tmp_path / "containers" / "mine"))
            assert (await programs.run([sys.executable, "-c", code], folder, dict(os.environ), b""))[0] == 0
            assert (tmp_path / "containers" / "mine").exists()

    asyncio.run(main())
    assert os.listdir(tmp_path / "containers") == ["other"]
    (tmp_path / "containers" / "left").write_text(f"hotseat.host={programs.name}\n")
    programs.close()
    assert os.listdir(tmp_path / "containers") == ["other"]


def test_containers_of_a_program_are_kept_where_they_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    programs = ProgramHost("true")
    code = "import os; print(os.environ['XDG_DATA_HOME'])"

    async def main():
        async with programs.folder() as folder:
            return await programs.run([sys.executable, "-c", code], folder, environment(folder, (), {}), b"")

    try:
        assert asyncio.run(main()) == (0, str(tmp_path / ".local" / "share"))
    finally:
        programs.close()


def test_containers_that_cannot_be_removed_are_an_error(tmp_path):
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\ncase $1 in\n  ps) echo one ;;\n  rm) echo it is paused >&2; exit 2 ;;\nesac\n")
    engine.chmod(0o755)
    with pytest.raises(RuntimeError, match="engine rm: it is paused"):
        supervisor.remove_containers(str(engine), "hotseat.host=x")


@pytest.mark.long
def test_podmans_containers_with_the_label_are_removed(tmp_path):
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    labels = tmp_path / "labels"
    labels.write_text(f"hotseat.host=test{os.getpid()}\n")
    # Created and not running: to run one needs more of the system than to remove one.
    create = ["podman", "create", "--label-file", str(labels), "--rootfs", str(tmp_path), "sleep", "1000"]
    made = subprocess.run(create, capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"podman cannot make a container here: {made.stderr}")
    supervisor.remove_containers("podman", f"hotseat.host=test{os.getpid()}")
    assert subprocess.run(["podman", "container", "exists", made.stdout.strip()]).returncode == 1


def test_folders_of_episodes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run(tmp_path, "open('left', 'w').write('x'); write('1')")
    assert sorted(os.listdir(tmp_path)) == ["program.py"]


@pytest.mark.parametrize("form", ["play", "command"])
def test_the_examples_guess_a_number(form):
    examples = Path(__file__).parents[2] / "examples" / "agents"
    programs = ProgramSettings(command=(sys.executable, str(examples / "guess_program.py")))
    path = str(examples / "guess_with_openai.py") if form == "play" else None
    agent = load_agent(
        path, tokenizer_of("smollm2"), max_length=600, programs=programs if form == "command" else ProgramSettings()
    )
    engine = Engine("50", "no idea", "7")
    with AgentHost(agent, engine, run_seed=5, timeout_s=WAIT_S) as host:
        outcome = host.submit(Prompt(3, "Guess:", (1,), "7"), KEY, SAMPLING).result(WAIT_S)
    assert isinstance(outcome, ScoredEpisode), outcome
    assert (outcome.reward, outcome.extra) == (1.0, {"num_guesses": 3.0})
    assert ["It is lower." in engine.contexts[1], "It is higher." in engine.contexts[2]] == [True, True]
    assert learned(outcome.episode.segments, outcome.episode.turn_lengths) == engine.sampled


def test_a_program_that_cannot_be_started_is_a_failed_sample(tmp_path):
    (tmp_path / "not_one").write_text("#!/nowhere\n")
    (tmp_path / "not_one").chmod(0o755)
    programs = ProgramSettings(command=(str(tmp_path / "not_one"),))
    agent = load_agent(None, tokenizer_of("smollm2"), max_length=600, programs=programs)
    with AgentHost(agent, Engine(), run_seed=5, timeout_s=WAIT_S) as host:
        outcome = host.submit(Prompt(3, "bad?", (1,)), SampleKey(0, 3, 1), SAMPLING).result(WAIT_S)
    assert reason(outcome).startswith("the program cannot be started: ")


def test_a_program_need_not_be_readable(tmp_path):
    file = tmp_path / "program"
    file.write_bytes(b"\x7fELF")
    file.chmod(0o111)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(folder.stat().st_mode | 0o011)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # root reads everything
        check_startable(str(file))
    finally:
        os.seteuid(user)


def test_programs_that_could_not_be_hosted_are_tried_again(tmp_path, monkeypatch):
    file = tmp_path / "program.py"
    file.write_text(ASK + "ask([{'role': 'user', 'content': 'bad?'}]); write('1')")
    programs = ProgramSettings(command=(sys.executable, str(file)))
    agent = load_agent(None, tokenizer_of("smollm2"), max_length=600, programs=programs)
    with AgentHost(agent, Engine(), run_seed=5, timeout_s=WAIT_S) as host:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
        first = host.submit(Prompt(3, "bad?", (1,)), KEY, SAMPLING).result(WAIT_S)
        assert "missing" in reason(first)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        assert host.submit(Prompt(3, "bad?", (1,)), KEY, SAMPLING).result(WAIT_S).reward == 1.0


def test_a_file_with_play_is_an_agent_and_one_with_step_too_is_refused(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text("async def play(prompt): pass\n")
    with pytest.raises(
        UserError, match=r"play cannot be called with \(prompt, client\): too many positional arguments"
    ):
        load_file(file, None)
    file.write_text("async def play(prompt, client): pass\nasync def step(state, action, label): pass\n")
    with pytest.raises(UserError, match="has both step and play, each of which would be the agent: rename one of them"):
        load_agent(file, tokenizer_of("smollm2"), max_length=600)
