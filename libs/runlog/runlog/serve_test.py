"""A run's page over HTTP, at a loopback address alone."""

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runlog.run import RunLog
from runlog.serve import server


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    with server(tmp_path) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving.server_address[1]
        serving.shutdown()
        thread.join()


def get(port: int, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_follows_the_run(port: int, tmp_path: Path) -> None:
    before = get(port, "/state")
    assert "no metrics yet" in get(port, "/")[1]
    with RunLog(tmp_path, tensorboard=False) as log:
        log.metrics(1, {"reward": 0.25})
        between = get(port, "/state")
        assert ">0.25<" in get(port, "/")[1]
        log.metrics(2, {"reward": 0.75})
        status, page = get(port, "/")
    assert (status, ">0.75<" in page, "connect-src" in page) == (200, True, True)
    assert len({before, between, get(port, "/state")}) == 3
    (tmp_path / "metrics.jsonl").write_text("no json\n")
    status, said = get(port, "/")
    assert (status, "metrics.jsonl, line 1" in said) == (500, True)


def test_nothing_else_is_served(port: int) -> None:
    assert get(port, "/metrics.jsonl")[0] == get(port, "/../x")[0] == 404
    assert get(port, "/state", f"evil.example:{port}")[0] == 403
    assert get(port, "/state", f"localhost:{port}")[0] == 200
    with pytest.raises(ValueError, match=f"port {port}: Address already in use"):
        server(Path(), port)
    with pytest.raises(ValueError, match="no run directory"):
        server(Path("nowhere"))
