"""A Hugging Face hub on loopback: what huggingface_hub asks for a snapshot, with faults on demand."""

import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote

# Files above this are "large": their etag is their SHA-256, as for LFS files.
LARGE_BYTES = 1 << 20
COMMIT_DIGITS = 40


class StandinHub:
    """Serves directories as repositories. Every request is kept in `log` as (method, path, Range or "").

    `break_after`: called for each large file, how many bytes are sent before the connection breaks. `hold`: called with the
    bytes sent of a large file, after each piece; it may block. `gated`, `private`: repositories that want the token.
    """

    def __init__(self, repositories: dict[str, Path], token: str = "hf_secret") -> None:
        self.repositories, self.token = dict(repositories), token
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.break_after: Callable[[], int | None] = lambda: None
        self.ignores_range = False
        self.corrupt = False
        self.hold: Callable[[int], None] | None = None
        self.status: int | None = None  # answered to everything
        self.log: list[tuple[str, str, str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _answering(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def ranges(self, file_name: str) -> list[str]:
        """The Range headers with which a file's bytes were asked for, in order."""
        return [wanted for method, path, wanted in self.log if method == "GET" and path.endswith(f"/{file_name}")]

    def commit(self, repository: str) -> str:
        """The only commit: made from the files as they are now."""
        content = "".join(path.name + _etag(path) for path in _files(self.repositories[repository]))
        return hashlib.sha1(content.encode(), usedforsecurity=False).hexdigest()


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_file())


def _etag(path: Path) -> str:
    status = path.stat()
    return _digest(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache
def _digest(path: Path, size: int, mtime_ns: int) -> str:
    content = path.read_bytes()
    if len(content) > LARGE_BYTES:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _answering(hub: StandinHub) -> type[BaseHTTPRequestHandler]:
    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's own name
            """Nothing on stderr."""

        def do_HEAD(self) -> None:
            self._serve()

        def do_GET(self) -> None:
            self._serve()

        def _serve(self) -> None:
            path = unquote(self.path.partition("?")[0])
            hub.log.append((self.command, path, self.headers.get("Range", "")))
            if hub.status is not None:
                self._answer(hub.status)
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree)/(.+?))?/?", path):
                self._repository(match[1], match[2] or "revision", match[3] or "main")
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._file(match[1], match[2], match[3])
            else:
                self._answer(404)

        def _refused(self, repository: str, revision: str) -> bool:
            authorized = self.headers.get("Authorization") == f"Bearer {hub.token}"
            if repository not in hub.repositories or (repository in hub.private and not authorized):
                self._answer(
                    404 if authorized else 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
                )
            elif repository in hub.gated and not authorized:
                self._answer(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to it is restricted"})
            elif revision not in {"main", hub.commit(repository)}:
                self._answer(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            else:
                return False
            return True

        def _repository(self, repository: str, what: str, revision: str) -> None:
            if self._refused(repository, revision):
                return
            files = _files(hub.repositories[repository])
            if what == "tree":
                tree = []
                for path in files:
                    size = path.stat().st_size
                    entry: dict[str, object] = {"type": "file", "path": path.name, "size": size, "oid": _etag(path)[:40]}
                    if size > LARGE_BYTES:
                        entry["lfs"] = {"oid": _etag(path), "size": size, "pointerSize": 130}
                    tree.append(entry)
                self._answer(200, {"Content-Type": "application/json"}, json.dumps(tree).encode())
                return
            info = {"_id": "0" * 24, "id": repository, "sha": hub.commit(repository), "private": False, "tags": []}
            siblings = [{"rfilename": path.name} for path in files]
            self._answer(200, {"Content-Type": "application/json"}, json.dumps({**info, "siblings": siblings}).encode())

        def _file(self, repository: str, revision: str, name: str) -> None:
            if self._refused(repository, revision):
                return
            path = hub.repositories[repository] / name
            if not path.is_file():
                self._answer(404, {"X-Error-Code": "EntryNotFound"})
                return
            content = path.read_bytes()
            headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": hub.commit(repository), "Accept-Ranges": "bytes"}
            start = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if hub.corrupt and len(content) > LARGE_BYTES:
                content = bytes([content[0] ^ 1]) + content[1:]
            if start and not hub.ignores_range:
                first = int(start[1])
                headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
                self._answer(206, headers, content[first:], large=len(content) > LARGE_BYTES)
            else:
                self._answer(200, headers, content, large=len(content) > LARGE_BYTES)

        def _answer(
            self, status: int, headers: dict[str, str] | None = None, body: bytes = b"", *, large: bool = False
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if not large:
                self.wfile.write(body)
                return
            self._send_slowly(body)

        def _send_slowly(self, body: bytes) -> None:
            sent, break_after = 0, hub.break_after()
            try:
                while sent < len(body):
                    if break_after is not None and sent >= break_after:
                        self.close_connection = True
                        return
                    piece = body[sent : sent + (256 << 10)]
                    self.wfile.write(piece)
                    sent += len(piece)
                    if hub.hold is not None:
                        hub.hold(sent)
            except OSError:
                self.close_connection = True

    return Answer
