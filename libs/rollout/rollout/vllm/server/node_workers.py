"""The workers of a vLLM on a further machine, which the first machine's process calls (vLLM's `--headless`)."""

from multiprocessing.process import BaseProcess
from typing import Any

import vllm
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from rollout.vllm.server.generator import device_kind, read_arguments


class NodeWorkers:
    """Workers of this machine, which have met those of the others once this is made.

    Args:
        start: what `Generator` takes, with this machine's place in `engine`.

    Raises:
        ValueError: vLLM can't do what is asked; the text says why.
    """

    def __init__(self, start: dict[str, Any]) -> None:
        self._config = read_arguments(start).create_engine_config(headless=True)
        self._executor = MultiprocExecutor(self._config, monitor_workers=False)

    @property
    def workers(self) -> list[BaseProcess]:
        """The worker processes of this machine."""
        return [worker.proc for worker in self._executor.workers]

    def model_info(self) -> dict[str, Any]:
        """Return facts on the workers."""
        model = self._config.model_config
        return {
            "vllm": vllm.__version__,
            "device": device_kind(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "workers": [worker.pid for worker in self.workers],
        }
