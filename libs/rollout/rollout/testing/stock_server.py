"""A server for tests that speaks vLLM's protocol over loopback: stock transformers in a process of its own.

It shares no code with the engines: each sequence is read alone, and its log-probs are those of one softmax in float32.
"""

import contextlib
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True)
class StockServer:
    """A running server: its address, and its process."""

    url: str
    pid: int

    def kill(self) -> None:
        """End it at once."""
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Stop its process: connections stay open, and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)


@contextlib.contextmanager
def stock_server(
    directory: Path, *, max_logprobs: int = -1, max_length: int = 512, tokenizer: bool = True, port: int = 0
) -> Iterator[StockServer]:
    """Serve the model of a directory while the block runs; `max_logprobs`, `max_length`, no `tokenizer`: as vLLM's."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    settings = (directory, max_logprobs, max_length, tokenizer, port)
    process = context.Process(target=_serve, args=(theirs, *settings), daemon=True)
    process.start()
    theirs.close()
    try:
        assert process.pid is not None
        yield StockServer(f"http://127.0.0.1:{ours.recv()}", process.pid)
    finally:
        process.kill()
        process.join()


def _serve(told: Connection, directory: Path, *settings: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    handler = type("Handler", (_Handler,), {"served": _Served(directory, model, *settings[:3])})
    server = ThreadingHTTPServer(("127.0.0.1", settings[3]), handler)
    told.send(server.server_address[1])
    server.serve_forever()


class _Served:
    def __init__(self, directory: Path, model: Any, max_logprobs: int, max_length: int, tokenizer: bool) -> None:
        self.model, self.max_logprobs, self.max_length = model, max_logprobs, max_length
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory) if tokenizer else None

    def completion(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return greedy tokens, and the log-probs of the prompt's where they are asked for."""
        ids, k = list(body["prompt"]), body.get("prompt_logprobs")
        if k is not None and 0 <= self.max_logprobs < k:
            text = f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.max_logprobs}"
            return 400, {"error": {"message": text}}
        if len(ids) + body["max_tokens"] > self.max_length:
            return 400, {"error": {"message": f"This model's maximum context length is {self.max_length} tokens"}}
        rows = (
            None
            if k is None
            else [None, *(self._row(x, i, k) for x, i in zip(self._table(ids)[:-1], ids[1:], strict=True))]
        )
        new: list[int] = []
        for _ in range(body["max_tokens"]):
            new.append(int(self._table([*ids, *new])[-1].argmax()))
        log_probs = {"token_logprobs": [0.0] * len(new), "tokens": [f"token_id:{i}" for i in new]}
        choice = {"index": 0, "text": "", "token_ids": new, "logprobs": log_probs, "finish_reason": "length"}
        return 200, {"choices": [{**choice, "prompt_logprobs": rows}]}

    @torch.no_grad()
    def _table(self, ids: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)  # type: ignore[no-any-return]

    def _row(self, table: torch.Tensor, own: int, k: int) -> dict[str, dict[str, Any]]:
        best = dict.fromkeys([*table.topk(k).indices.tolist(), own])
        return {str(i): {"logprob": float(table[i]), "decoded_token": None} for i in best}


class _Handler(BaseHTTPRequestHandler):
    served: _Served
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "teacher", "max_model_len": self.served.max_length}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/completions":
            self._answer(*self.served.completion(body))
        elif self.path == "/detokenize" and self.served.tokenizer is not None:
            self._answer(200, {"prompt": self.served.tokenizer.decode(body["tokens"])})
        else:
            self._answer(404, {"detail": "Not Found"})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Do nothing."""
