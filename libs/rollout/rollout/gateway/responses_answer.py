"""Answers of the Responses API: one object, or the events of a stream that build the same items."""

import json
from collections.abc import Mapping
from typing import Any

from rollout.gateway.answers import Answer
from rollout.gateway.chat_request import RequestError
from rollout.gateway.responses_request import ResponsesRequest


class ResponsesWire:
    """The form of one response: its events while it is sampled, or the whole. `number` is the request's."""

    def __init__(self, request: ResponsesRequest, number: str, created: int) -> None:
        self._request, self._number, self._created = request, number, created
        self._sent = 0
        self._items: list[dict[str, Any]] = []

    def chunk(self, chunk: Mapping[str, Any]) -> list[bytes]:
        """Return the events of a piece of chat completions' stream."""
        begun = self._begun()
        return [*begun, *(event for choice in chunk["choices"] for event in self._delta(choice["delta"]))]

    def end(self, answer: Answer) -> list[bytes]:
        """Return the last events of a stream."""
        status, begun = _status(answer), [*self._begun(), *self._without_items()]
        ended = [event for index, item in enumerate(self._items) for event in self._done(index, item, status)]
        return [*begun, *ended, self._event(f"response.{status}", response=self._response(status, answer))]

    def refusal(self, error: RequestError) -> bytes:
        """Return the event of an error in a stream."""
        body = error.body()["error"]
        said = {"code": body["code"], "message": body["message"], "param": body["param"], "error": body}
        return self._event("error", **said)

    def body(self, answer: Answer) -> dict[str, Any]:
        """Return the whole response."""
        self._delta(answer.choices[0].message)
        self._without_items()
        status = _status(answer)
        for item in self._items:
            if "status" in item:
                item["status"] = status
        return self._response(status, answer)

    def _begun(self) -> list[bytes]:
        """Return the first events of a stream, once."""
        if self._sent:
            return []
        response = self._response("in_progress", None)
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def _without_items(self) -> list[bytes]:
        """Add an empty message where there is neither text nor a call: the turn has to come back as something."""
        return [] if any(item["type"] != "reasoning" for item in self._items) else self._text("message", "")

    def _delta(self, delta: Mapping[str, Any]) -> list[bytes]:
        events = []
        if delta.get("reasoning_content"):
            events += self._text("reasoning", delta["reasoning_content"])
        if delta.get("content"):
            events += self._text("message", delta["content"])
        return events + [event for call in delta.get("tool_calls") or () for event in self._call(call)]

    def _text(self, kind: str, text: str) -> list[bytes]:
        """Add text to the item of its kind, which begins with its first text."""
        index = next((i for i, item in enumerate(self._items) if item["type"] == kind), None)
        events = []
        if index is None:
            index = len(self._items)
            if kind == "message":
                part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item: dict[str, Any] = {"id": f"msg_{self._number}", "type": kind, "role": "assistant", "content": []}
                item["status"] = "in_progress"
            else:
                part = {"type": "reasoning_text", "text": ""}
                item = {"id": f"rs_{self._number}", "type": kind, "summary": [], "content": []}
            self._items.append(item)
            events.append(self._event("response.output_item.added", output_index=index, item=item))
            item["content"].append(part)
            events.append(self._event("response.content_part.added", **self._place(index), content_index=0, part=part))
        self._items[index]["content"][0]["text"] += text
        name = f"response.{self._items[index]['content'][0]['type']}.delta"
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return [*events, self._event(name, **self._place(index), content_index=0, delta=text, **more)]

    def _call(self, call: Mapping[str, Any]) -> list[bytes]:
        index, function = len(self._items), call["function"]
        item = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"], "name": function["name"]}
        item |= {"arguments": "", "status": "in_progress"}
        self._items.append(item)
        events = [self._event("response.output_item.added", output_index=index, item=item)]
        item["arguments"] = function["arguments"]
        name = "response.function_call_arguments.delta"
        return [*events, self._event(name, **self._place(index), delta=function["arguments"])]

    def _done(self, index: int, item: dict[str, Any], status: str) -> list[bytes]:
        place = self._place(index)
        if item["type"] == "function_call":
            said = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._event("response.function_call_arguments.done", **place, **said)]
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            name = f"response.{part['type']}.done"
            events = [
                self._event(name, **place, content_index=0, text=part["text"], **more),
                self._event("response.content_part.done", **place, content_index=0, part=part),
            ]
        if "status" in item:
            item["status"] = status
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]

    def _place(self, index: int) -> dict[str, Any]:
        return {"item_id": self._items[index]["id"], "output_index": index}

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()

    def _response(self, status: str, answer: Answer | None) -> dict[str, Any]:
        body = self._request.body
        told = {
            "id": f"resp_{self._number}",
            "object": "response",
            "created_at": self._created,
            "model": body["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [] if answer is None else self._items,
            "usage": None if answer is None else _usage(answer),
            "tools": body.get("tools", []),
            "tool_choice": body.get("tool_choice", "auto"),
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "store": self._request.is_stored,
            "truncation": "disabled",
            "text": {"format": {"type": "text"}},
            "metadata": body.get("metadata", {}),
        }
        names = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p")
        return told | {name: body.get(name) for name in names}


def _status(answer: Answer) -> str:
    return "incomplete" if answer.choices[0].finish_reason == "length" else "completed"


def _usage(answer: Answer) -> dict[str, Any]:
    counts = answer.usage()
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
