"""An S3 on loopback, moto's, with a way to have requests fail as real stores do."""

import contextlib
import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs

import pytest

KEY, SECRET = "AKIAONLYFORTESTS", "a/secret+that=nobody.should/see"
XML = "<?xml version='1.0'?><Error><Code>{}</Code><Message>made to fail</Message></Error>"
REFUSED = "<Error><Key>{}</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
Fault = Callable[["Request"], str | None]


class Request:
    """What was asked of the store."""

    def __init__(self, environ: dict[str, Any]) -> None:
        self.method, self.path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.query = environ.get("QUERY_STRING", "")
        query = parse_qs(self.query, keep_blank_values=True)
        self.is_part = "partNumber" in query
        self.lists_uploads = "uploads" in query and self.method == "GET"
        self.deletes = self.method == "DELETE" or (self.method == "POST" and "delete" in query)
        self.begins_parts = "uploads" in query and self.method == "POST"


class Store:
    """The server's other side: what it holds, what it was asked, how it fails."""

    def __init__(self, bucket: Callable[[], Any], port: int) -> None:
        self.bucket, self.port = bucket, port
        self.fault: Fault = lambda request: None
        self.requests: list[Request] = []
        self.released = threading.Event()

    def url(self, run: str) -> str:
        """Where a run may keep its checkpoints."""
        return f"s3://bucket/{run}"

    def objects(self, run: str) -> dict[str, bytes]:
        """Name and content of all objects of a run."""
        found = self.bucket().keys.items()
        return {k.removeprefix(f"{run}/"): o.value for k, o in found if k.startswith(f"{run}/")}

    def put(self, run: str, name: str, content: bytes) -> None:
        """Change an object behind the owner's back, and the store's, which has a checksum."""
        key = self.bucket().keys[f"{run}/{name}"]
        key.value, key.checksum_value, key.checksum_algorithm = content, None, None

    def remove(self, run: str, name: str) -> None:
        """Lose an object."""
        self.bucket().keys.pop(f"{run}/{name}")

    @property
    def half_uploads(self) -> int:
        """How many uploads in parts were begun and neither completed nor dropped."""
        return len(self.bucket().multiparts)

    @contextlib.contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        """Fail requests, by what `fault` says of each (None: it does not fail).

        A status; "cut" (off, half way), "lost" (its answer), "short" (half of its answer), "hang"
        (no answer), "late" (it takes a second), "200" (the answer calls an error a success).
        """
        self.fault, before = fault, self.fault
        self.released.clear()
        try:
            yield
        finally:
            self.fault = before
            self.released.set()

    def middleware(self, app: Any) -> Any:
        """What stands between the network and the store."""

        def wrapped(environ: dict[str, Any], start_response: Any) -> Any:
            request = Request(environ)
            self.requests.append(request)
            how = self.fault(request)
            if how == "late":
                time.sleep(1)
            if how in (None, "late"):
                return app(environ, start_response)
            if how == "short":
                return half(b"".join(app(environ, start_response)), environ)
            if how == "lost":
                list(app(environ, lambda *_: None))
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                raise ConnectionResetError
            if how in ("hang", "cut"):
                length = int(environ.get("CONTENT_LENGTH") or 0)
                environ["wsgi.input"].read(length if how == "hang" else length // 2)
                if how == "hang":
                    self.released.wait(600)
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                raise ConnectionResetError
            asked = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            if how == "403" and request.deletes and request.method == "POST":
                keys = re.findall(rb"<Key>(.*?)</Key>", asked)
                start_response("200 OK", [("Content-Type", "application/xml")])
                refused = "".join(REFUSED.format(key.decode()) for key in keys)
                return [f"<?xml version='1.0'?><DeleteResult>{refused}</DeleteResult>".encode()]
            words = {"500": "InternalError", "503": "SlowDown", "403": "AccessDenied"}
            words |= {"404": "NoSuchKey", "200": "InternalError"}
            content = b"" if request.method == "HEAD" else XML.format(words[how]).encode()
            start_response(f"{how} Made to fail", [("Content-Type", "application/xml")])
            return [content]

        return wrapped


def half(content: bytes, environ: dict[str, Any]) -> Iterator[bytes]:
    """Half of an answer that was announced as whole, and no more."""
    yield content[: len(content) // 2]
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError


@contextlib.contextmanager
def s3(patch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store with an empty bucket; this process and its children find it by the environment."""
    from moto.backends import get_backend
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *arguments: Any) -> None:
            """Say nothing."""

    def bucket() -> Any:
        return get_backend("s3")[DEFAULT_ACCOUNT_ID]["aws"].buckets["bucket"]

    store = Store(bucket, 0)
    app = store.middleware(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    store.port = server.server_port
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        "no_proxy": "127.0.0.1",
    }
    for name, value in environment.items():
        patch.setenv(name, value)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", store.port)) as connection:
        connection.request("PUT", "/bucket", headers={"Host": "s3.amazonaws.com"})
        assert connection.getresponse().status == 200
    try:
        yield store
    finally:
        store.released.set()
        server.shutdown()
        thread.join()
