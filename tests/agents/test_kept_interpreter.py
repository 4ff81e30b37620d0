"""Programs that are forked from an interpreter that stays behave as those that are started anew."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from gateway_cases import WAIT_S

from hotseat.agents import program_end
from hotseat.agents.confinement import Confinement, best_confinement
from hotseat.agents.programs import Preload, ProgramHost, environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not best_confinement().hides_processes, reason="no PID namespace can be made here"),
]


def host_of(tmp_path: Path, code: str, modules: tuple[str, ...] | None = ("json",)) -> tuple[ProgramHost, list[str]]:
    """A host, and the command of a program. modules: None starts the program anew."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(code))
    command = [sys.executable, str(script), "word"]
    host = ProgramHost(preload=None if modules is None else Preload(tuple(command), modules))
    assert (host._kept is None) == (modules is None)
    return host, command


async def run(host: ProgramHost, command: list[str], line: str = "line", **env: str) -> tuple[int, str]:
    async with host.folder() as folder:
        code, written = await host.run(command, folder, environment(folder, (), env), f"{line}\n".encode())
        return code, written.replace(folder.name, "FOLDER").replace(host._folder.name, "HOST")


BEHAVIOURS = {
    "what it sees": """
        import os, random, sys
        print(__name__, __file__, sys.argv, sys.stdin.read(), os.environ["OWN"], os.getcwd(), os.environ["HOME"])
        print(sorted({*os.environ, "PWD"}), sys.path[0], sys.stdout.encoding, sys.flags, os.listdir("/proc/self/fd"))
        print(len([name for name in os.listdir("/proc") if name.isdigit()]) < 8, os.listdir("."), sorted(globals()))
        kept = ("CapInh", "CapPrm", "CapEff", "CapAmb", "NoNewPrivs", "SigBlk", "SigIgn", "SigCgt", "Threads")
        print([line for line in open("/proc/self/status") if line.startswith(kept)])
    """,
    "an exit code": "import sys; print('before'); sys.exit(3)",
    "an exit with a text": "import sys; sys.exit('no luck')",
    "an exit code below zero": "import sys; sys.exit(-2)",
    "an exit code without an end": "import sys; sys.exit(2**70)",
    "an exit without clean-up": "import os; os._exit(200)",
    "an error": "def fail():\n    raise ValueError('no luck')\nfail()",
    "an error in the grammar": "x = (",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(1000)",
    "a segmentation fault": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "an interrupt": "print('before'); raise KeyboardInterrupt",
    "what runs at the end": """
        import atexit, threading, time
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.2), print("in a thread"))).start()
        print("main")
    """,
    "an error at the end": "import atexit; atexit.register(divmod, 1, 0); print('before')",
    "a thread that never ends": """
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        print("main")
    """,
    "an interrupt beside a thread": """
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        raise KeyboardInterrupt
    """,
    "output that cannot be written": "import os; print('lost'); os.close(1)",
    "what is left": """
        class Left:
            def __del__(self):
                print("left", end=" ")
        left, cycle = Left(), Left()
        cycle.itself = cycle
    """,
    "a file that is left open": "import os; file = open(os.dup(1), 'w'); file.write('written')",
    "a file in a library": "import json, os; json.file = open(os.dup(1), 'w'); json.file.write('written')",
    "another output": "import os, sys; sys.stdout = open(os.dup(1), 'w'); print('written')",
    "other processes": """
        import multiprocessing, subprocess, sys
        def double(number):
            return 2 * number
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
            print(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout)
    """,
}


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_a_fork_behaves_as_a_fresh_process(tmp_path, name):
    results = []
    for modules in (("json", "multiprocessing"), None):
        host, command = host_of(tmp_path, BEHAVIOURS[name], modules)
        try:
            results.append(asyncio.run(run(host, command, OWN="its own")))
        finally:
            host.close()
    forked, fresh = results
    assert forked == fresh


def test_a_fork_clears_its_own_modules_and_not_those_of_libraries(tmp_path):
    (tmp_path / "helper.py").write_text(
        "class Left:\n    def __init__(self, name):\n        self.name = name\n"
        "    def __del__(self):\n        print(self.name)\n"
        "early = Left('of a module beside it, before the fork')\n"
    )
    code = """
        import helper, json
        helper.late = helper.Left("of a module beside it")
        json.left, own = helper.Left("of a library"), helper.Left("its own")
        json.user = lambda: own
    """
    expected = ["its own", "of a module beside it", "of a module beside it, before the fork"]
    for modules in (("helper", "json"), ("json",)):
        host, command = host_of(tmp_path, code, modules)
        try:
            ended, written = asyncio.run(run(host, command))
        finally:
            host.close()
        assert (ended, sorted(written.splitlines())) == (0, expected)


def test_exit_handlers_that_were_there_before_are_called():
    code = """
        import atexit, runpy, sys
        if sys.argv[2] == "first":
            atexit.register(print, "at exit")
        end = runpy.run_path(sys.argv[1])["ProgramEnd"]()
        end.share()
        if sys.argv[2] == "later":
            atexit.register(print, "at exit")
        end.code = 3
        sys.exit(end.code)
    """
    for when in ("first", "later"):
        command = [sys.executable, "-c", textwrap.dedent(code), program_end.__file__, when]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert (ended.returncode, ended.stdout, ended.stderr) == (3, "at exit\n", "")


def test_episodes_share_what_is_preloaded_and_nothing_else(tmp_path):
    (tmp_path / "library.py").write_text("import os\nprint('not shown')\npid = os.getppid()\nseen = []\n")
    host, command = host_of(
        tmp_path,
        """
        import random, sys
        was_loaded = "library" in sys.modules
        import library
        library.seen.append(1)
        print(was_loaded, len(library.seen), globals().get("own"))
        own = 1
        print(random.random())
        """,
        ("library", "random"),
    )

    async def play() -> list[tuple[int, str]]:
        return list(await asyncio.gather(*(run(host, command) for _ in range(5))))

    try:
        outcomes = asyncio.run(play())
    finally:
        host.close()
    lines = [written.splitlines() for code, written in outcomes if code == 0]
    assert [first for first, _ in lines] == ["True 1 None"] * 5
    assert len({drawn for _, drawn in lines}) == 5


def test_certificates_are_read_late_and_are_the_same(tmp_path):
    code = """
        import ssl
        context = ssl.create_default_context()
        print("unread" in vars(context), context.verify_mode, context.check_hostname, len(context.get_ca_certs()))
    """
    results = []
    for modules in (("ssl",), None):
        host, command = host_of(tmp_path, code, modules)
        try:
            code_and_text = asyncio.run(run(host, command, SSL_CERT_FILE=os.environ.get("SSL_CERT_FILE", "")))
            results.append(code_and_text)
        finally:
            host.close()
    forked, fresh = results
    assert forked[1].startswith("True ")
    assert (forked[0], forked[1].partition(" ")[2]) == (fresh[0], fresh[1].partition(" ")[2])


def test_what_openai_imports_at_its_first_request_is_there_in_every_fork(tmp_path):
    code = """
        import http.server, json, os, sys, threading
        import openai
        there = set(sys.modules)

        class Answers(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["content-length"]))
                message = {"role": "assistant", "content": "seven"}
                body = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Answers)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = openai.OpenAI(api_key="none", base_url=f"http://127.0.0.1:{server.server_port}")
        reply = client.chat.completions.create(model="none", messages=[{"role": "user", "content": "number?"}])
        server.shutdown()
        print(reply.choices[0].message.content, sorted(name for name in set(sys.modules) - there if "openai" in name))
    """
    host, command = host_of(tmp_path, code, ("http.server", "openai"))
    try:
        ended, written = asyncio.run(run(host, command, SSL_CERT_FILE=os.environ.get("SSL_CERT_FILE", "")))
    finally:
        host.close()
    assert (ended, written.split(maxsplit=1)) == (0, ["seven", "[]"])


def test_what_a_fork_started_has_ended_before_its_folder_is_removed(tmp_path):
    code = """
        import os, subprocess, sys, time
        line = sys.stdin.readline()
        subprocess.Popen(["sh", "-c", "while :; do date > $HOME/$$; done"], start_new_session=True)
        if "waits" in line:
            open(os.environ["UP"], "w").close()
            time.sleep(1e6)
    """
    host, command = host_of(tmp_path, code)
    up = tmp_path / "up"

    async def cancelled() -> None:
        playing = asyncio.ensure_future(run(host, command, "waits", UP=str(up)))
        deadline = time.monotonic() + WAIT_S
        while not up.exists():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    try:
        assert asyncio.run(run(host, command))[0] == 0
        asyncio.run(cancelled())
        assert [path.name for path in host._folder.iterdir()] == ["interpreter"]
    finally:
        host.close()
    assert not host._folder.exists()


def test_a_host_that_is_killed_leaves_no_fork_behind(tmp_path):
    script, up = tmp_path / "program.py", tmp_path / "up"
    script.write_text("import os, time\nopen(os.environ['UP'], 'w').write(str(os.getcwd()))\ntime.sleep(1e6)\n")
    code = f"""
        import asyncio
        from hotseat.agents.programs import Preload, ProgramHost, environment
        async def main():
            command = ({sys.executable!r}, {str(script)!r})
            host = ProgramHost(preload=Preload(command, ("json",)))
            assert host._kept is not None
            async with host.folder() as folder:
                env = environment(folder, (), {{"UP": {str(up)!r}}})
                await host.run(command, folder, env, b"\\n")
        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)]) as host:
        deadline = time.monotonic() + WAIT_S
        while not up.exists() or not up.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        folder = Path(up.read_text())
        host.send_signal(signal.SIGKILL)
    while folder.exists() or running_in(folder):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def running_in(folder: Path) -> list[str]:
    """Processes whose working directory a folder is, or was."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/cwd").startswith(str(folder)):
                found.append(pid)
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("module", "command", "expected"),
    [
        ("starts", None, "a module that it imports starts threads, which a fork does not have"),
        ("json", ("-c", "pass"), "agent.command is not an interpreter with a Python file after it"),
    ],
)
def test_where_a_fork_is_not_safe_programs_are_started_anew(tmp_path, caplog, module, command, expected):
    (tmp_path / "starts.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n"
    )
    script = tmp_path / "program.py"
    script.write_text("print('ran')")
    words = [sys.executable, *(command or [str(script)])]
    host = ProgramHost(preload=Preload(tuple(words), (module,)))
    try:
        assert host._kept is None
        assert asyncio.run(run(host, words)) == (0, "" if command else "ran")
    finally:
        host.close()
    assert f"agent.preload has no effect, every program imports what it needs: {expected}" in caplog.text


def test_when_the_interpreter_has_ended_programs_are_started_anew(tmp_path, caplog):
    host, command = host_of(tmp_path, "print('ran')")
    try:
        assert asyncio.run(run(host, command)) == (0, "ran")
        assert host._kept is not None
        host._kept._process.kill()
        host._kept._process.wait()
        assert asyncio.run(run(host, command)) == (0, "ran")
    finally:
        host.close()
    assert "the interpreter that has imported agent.preload has ended" in caplog.text


def test_without_a_namespace_programs_are_started_anew(caplog):
    host = ProgramHost(confinement=Confinement("process group"), preload=Preload((sys.executable, __file__), ("json",)))
    host.close()
    assert host._kept is None
    assert "programs are not confined in a PID namespace here" in caplog.text
