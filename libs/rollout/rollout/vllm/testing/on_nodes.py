"""One machine's end of a vLLM engine that spans several, for a test.

`python -m rollout.vllm.testing.on_nodes DIR TP PP`: DIR, which all machines see, has the models `old` and `new`. All
take the weights of `new`, and the first one writes what it samples of each to `old.json` and `new.json`. It then asks
for more until it is told that the engine is gone.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from rollout.engine import Sampling
from rollout.node_place import NodePlace, node_place
from rollout.sync.manifest import Manifest
from rollout.sync.pieces import buckets
from rollout.vllm.engine import VllmEngine
from rollout.vllm.node import vllm_engine
from rollout.vllm.testing.served import PROMPTS, config, sample
from rollout.vllm.weights.shared_weights import checkpoint_pieces


def main(folder: Path, tensor: int, pipeline: int) -> None:
    """Run this machine's end; the first one's ends with status 3 once the engine is gone."""
    place = node_place()
    assert place is not None
    settings = config(tensor_parallel=tensor, pipeline_parallel=pipeline, nodes=place.nnodes, start_seconds=1500.0)
    with vllm_engine(folder / "old", settings) as engine:
        if place.node_rank == 0:
            _write(engine, folder / "old.json")
        asyncio.run(_take(engine, place, folder))
        while place.node_rank:
            time.sleep(1)
        _write(engine, folder / "new.json")
        try:
            while True:
                sample(engine, PROMPTS, Sampling(max_new_tokens=200))
        except RuntimeError as error:
            print(f"lost: {error}", flush=True)
            sys.exit(0 if engine.alive else 3)


async def _take(engine: VllmEngine, place: NodePlace, folder: Path) -> None:
    """Take the new weights; the first machine commits last, as in `RayPool`."""
    await engine.prepare(Manifest(1))
    for bucket in buckets(checkpoint_pieces(folder / "new"), 1 << 20):
        await engine.receive(bucket)
    further = [folder / f"committed{rank}" for rank in range(1, place.nnodes)]
    while place.node_rank == 0 and not all(path.exists() for path in further):
        await asyncio.sleep(0.1)
    await engine.commit(1)
    if place.node_rank:
        further[place.node_rank - 1].touch()
    await engine.resume()


def _write(engine: VllmEngine, path: Path) -> None:
    """Write the tokens of all prompts, their log-probs and the versions of their weights."""
    rows = [[list(c.ids), list(c.log_probs), list(c.policy_versions)] for c in sample(engine, PROMPTS)]
    part = path.with_suffix(".part")
    part.write_text(json.dumps(rows))
    part.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
