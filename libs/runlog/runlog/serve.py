"""A run's page while it goes on, at a loopback address: the report, which takes new rows as they are written."""

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from runlog import store
from runlog.report import report_page
from runlog.timeline import TIMELINE

HOSTS = ("127.0.0.1", "localhost")
WAITING = "<!doctype html><meta http-equiv=refresh content=2><p>This run has no metrics yet."


def server(run_dir: Path, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of one run's page at 127.0.0.1; port 0 takes a free one (`server_address`).

    It answers two paths, `/` and `/state`, and a request under another host's name not at all: no page of the web can
    read a run through a name that leads here.

    Raises:
        ValueError: the directory does not exist, or the port is taken.
    """
    if not run_dir.is_dir():
        raise ValueError(f"no run directory {run_dir}")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").rpartition(":")[0] not in HOSTS:
                self._answer(HTTPStatus.FORBIDDEN, "served as 127.0.0.1 and localhost alone")
            elif self.path == "/state":
                self._answer(HTTPStatus.OK, state(run_dir))
            elif self.path.partition("?")[0] == "/":
                self._page()
            else:
                self._answer(HTTPStatus.NOT_FOUND, "the page is /")

        def _page(self) -> None:
            try:
                page = report_page(run_dir, live=True) if store.read_metrics(run_dir) else WAITING
            except ValueError as error:
                self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
            else:
                self._answer(HTTPStatus.OK, page, "text/html")

        def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
            body = text.encode()
            self.send_response(status)
            for name, value in (("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(body)))):
                self.send_header(name, value)
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002, the name of the base class
            del format, args

    try:
        return ThreadingHTTPServer((HOSTS[0], port), Handler)
    except OSError as error:
        raise ValueError(f"port {port}: {error.strerror}; --port 0 takes a free one") from error


def state(run_dir: Path) -> str:
    """Return a text that differs when a run has written more."""
    paths = [run_dir / name for name in (store.METRICS, store.EPISODES, TIMELINE)]
    return " ".join(str(path.stat().st_size) if path.exists() else "0" for path in paths)
