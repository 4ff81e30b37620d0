"""A server that speaks S3, on loopback, and that fails as a test says."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Response

BUCKET = "bucket"
SECRET = "secret-of-the-test"
KEYS = {"AWS_ACCESS_KEY_ID": "key-of-the-test", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}


class Quiet(WSGIRequestHandler):
    def log(self, *args, **kwargs):
        pass


class S3Server:
    """Moto, with what goes wrong before it.

    trouble: called with method and path of each request; it returns the status of an answer, a share of the answer's
    bytes after which the connection is cut, or None for an answer as it should be. It may also wait, or kill.
    """

    def __init__(self):
        self.trouble: Callable[[str, str], int | float | None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self._server.daemon_threads = True
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.port}"}
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

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
        if what is None:
            return self._app(environ, start_response)
        body = b"".join(self._app(environ, start_response))  # with its whole length in the headers
        return [body[: int(what * len(body))]]


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
