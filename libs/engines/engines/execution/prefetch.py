"""Work for the device that is prepared while it is busy: micro-batches, and the first of the next batch.

No threads are used: they would take the interpreter from the thread that feeds the device. Once a micro-batch is
launched, the host is ahead of the device and has the time. What it prepares goes through a stream of its own, so that
copies and look-ups wait for each other and not for the step that runs; whoever takes a micro-batch makes its own stream
wait for them.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engines.devices.detect import devices_of
from engines.execution.micro_batches import MicroBatch, MicroBatches


class PrefetchedMicroBatches(MicroBatches):
    """Micro-batches that are packed, copied and given the inputs of the model on a stream of their own."""

    def __init__(self, source: MicroBatches, prepare: Callable[[MicroBatch], Any]) -> None:
        """Take over the micro-batches of `source`; `prepare` makes `MicroBatch.inputs`."""
        super().__init__(source.batch, source.parts, source.group, source.device, source.keys)
        self.prepare = prepare
        self._devices = devices_of(source.device)
        self._begun: tuple[Iterator[MicroBatch], tuple[MicroBatch, Any]] | None = None

    def begin(self) -> None:
        """Prepare the first micro-batch of the next iteration."""
        source = super().__iter__()
        self._begun = source, self._next(source)

    def __iter__(self) -> Iterator[MicroBatch]:
        if self._begun is None:
            self.begin()
        assert self._begun is not None
        (source, (micro_batch, ready)), self._begun = self._begun, None
        for number in range(len(self)):
            if number:
                micro_batch, ready = self._next(source)
            stream = self._devices.current_stream()
            stream.wait_event(ready)
            for tensor in tensors_in(micro_batch):
                if tensor.device.type == self._devices.kind:
                    tensor.record_stream(stream)  # its memory is not used again before this stream is done with it
            yield micro_batch

    def _next(self, source: Iterator[MicroBatch]) -> tuple[MicroBatch, Any]:
        stream = _stream(self.device)
        with self._devices.on_stream(stream):
            micro_batch = next(source)
            micro_batch = replace(micro_batch, inputs=self.prepare(micro_batch))
            ready = self._devices.new_event()
            ready.record(stream)
        return micro_batch, ready


class PrefetchedStep:
    """The batch to prepare while the device works, at most one, with its objective."""

    def __init__(self) -> None:
        self._request: tuple[Any, Any, Callable[[], Any]] | None = None
        self._prepared: tuple[Any, Any, Any] | None = None

    def ask(self, batch: Any, objective: Any, prepare: Callable[[], Any]) -> None:
        """Record what to prepare, in place of an earlier request."""
        self._request = batch, objective, prepare

    def run(self) -> None:
        """Prepare what was asked for; call it when the device has enough to do. An error is not raised here: `take`
        then returns None, and its caller prepares the batch."""
        if self._request is None:
            return
        (batch, objective, prepare), self._request = self._request, None
        try:
            self._prepared = batch, objective, prepare()
        except (ValueError, KeyError, RuntimeError):
            self._prepared = None

    def take(self, batch: Any, objective: Any) -> Any:
        """Return, once, what was prepared of this very batch for this objective; None for any other."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared[0] is not batch or prepared[1] != objective:
            return None
        return prepared[2]


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors in a value, and in the attributes of objects and tensors in it, each once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        inner: Any = vars(value).values()
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in fields(value)]
    elif type(value).__name__ == "PackedContext":
        inner = vars(value).values()
    else:
        return
    for one in inner:
        yield from tensors_in(one, seen)


@cache
def _stream(device: torch.device) -> Any:
    return devices_of(device).new_stream()
