"""A server that speaks S3, on loopback, and that fails as a test says."""

import http.client
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Response
from werkzeug.wsgi import get_input_stream

BUCKET = "bucket"
SECRET = "secret-of-the-test"
KEYS = {"AWS_ACCESS_KEY_ID": "key-of-the-test", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}


class Quiet(WSGIRequestHandler):
    def log(self, *args, **kwargs):
        pass


# In a process of its own: vLLM looks at every object of every module that is loaded, and Flask's refuse that.
MOTO = """
import os, sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

class Quiet(WSGIRequestHandler):
    def log(self, *args, **kwargs):
        pass

def end_with_parent():
    sys.stdin.read()
    os._exit(0)

threading.Thread(target=end_with_parent, daemon=True).start()
app = DomainDispatcherApplication(create_backend_app)
server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
print(server.port, flush=True)
server.serve_forever()
"""
OWN_HEADERS = {"connection", "date", "server", "transfer-encoding"}


class S3Server:
    """Moto, with what goes wrong before it.

    trouble: called with method and path of each request; it returns the status of an answer, a share of the answer's
    bytes after which the connection is cut, or None for an answer as it should be. It may also wait, or kill.
    """

    def __init__(self):
        self.trouble: Callable[[str, str], int | float | None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._moto = subprocess.Popen([sys.executable, "-c", MOTO], text=True, **pipes)
        self._port = int(self._moto.stdout.readline())
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self._server.daemon_threads = True
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.port}"}
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._moto.kill()
        self._moto.communicate()

    def kill_at(self, number: int, pid: Callable[[], int], method: str = "PUT"):
        """Kill a process when the request of that number arrives."""
        seen = 0

        def trouble(asked: str, path: str) -> None:
            nonlocal seen
            with self._lock:
                seen += asked == method
                is_now = seen == number and asked == method
            if is_now:
                os.kill(pid(), signal.SIGKILL)

        self.trouble = trouble

    def _answer(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self._lock:
            self.requests.append((method, path))
        what = self.trouble(method, path)
        if isinstance(what, int):
            return Response("trouble", status=what)(environ, start_response)
        body = self._forward(environ, start_response)  # with its whole length in the headers
        return [body if what is None else body[: int(what * len(body))]]

    def _forward(self, environ, start_response):
        """Ask moto; pass its status and headers on, and return its body."""
        named = {key[5:].replace("_", "-"): value for key, value in environ.items() if key.startswith("HTTP_")}
        headers = {key: value for key, value in named.items() if key.lower() not in OWN_HEADERS}
        if environ.get("CONTENT_TYPE"):
            headers["Content-Type"] = environ["CONTENT_TYPE"]
        sent = get_input_stream(environ).read()
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request(environ["REQUEST_METHOD"], environ["REQUEST_URI"], sent, headers)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        kept = [(key, value) for key, value in answer.getheaders() if key.lower() not in OWN_HEADERS]
        start_response(f"{answer.status} {answer.reason}", kept)
        return body


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Serve a new, empty bucket; the environment has what a client needs."""
    server = S3Server()
    patch = pytest.MonkeyPatch()
    try:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in server.environment.items():
            patch.setenv(name, value)
        import s3fs

        files = s3fs.S3FileSystem(skip_instance_cache=True)
        if files.exists(BUCKET):
            files.rm(BUCKET, recursive=True)
        files.mkdir(BUCKET)
        yield server
    finally:
        patch.undo()
        server.close()
