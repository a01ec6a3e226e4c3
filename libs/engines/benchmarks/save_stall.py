"""How long a checkpoint stalls training: written while the step waits, or copied to host memory and written meanwhile.

    python libs/engines/benchmarks/save_stall.py [--hidden 512] [--layers 8] [--steps 12] [--every 4]

Prints, for no checkpoint, `save(wait=True)` and `save(wait=False)`: seconds that a call of save took, of a step, and
of the whole loop to its last file. On a CPU the copy and the write share the memory and the cores of the steps.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

from engines import EngineConfig, TrainEngine, build_engine
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT


def measure(engine: TrainEngine, wait: bool | None, steps: int, every: int) -> tuple[list[float], list[float], float]:
    """Return the seconds of each call of save, of each step, and of the whole loop; `wait` None saves nothing."""
    batch, saves, times = tiny_batch([60, 61, 62, 63] * 4), [], []
    with tempfile.TemporaryDirectory() as folder:
        loop_start = time.perf_counter()
        for step in range(steps):
            start = time.perf_counter()
            engine.train_batch(batch, SFT())
            trained = time.perf_counter()
            times.append(trained - start)
            if wait is not None and step % every == 0:
                engine.save(Path(folder) / "last", wait=wait)
                saves.append(time.perf_counter() - trained)
        engine.wait_for_saves()
        return saves, times, time.perf_counter() - loop_start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("hidden", 512), ("layers", 8), ("steps", 12), ("every", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    sizes = {"hidden_size": options.hidden, "intermediate_size": 4 * options.hidden}
    engine = build_engine(EngineConfig(device="auto"), tiny_model(num_hidden_layers=options.layers, **sizes))
    parameters = engine.state_summary()["parameters"]
    print(f"{parameters:,} parameters, {12 * parameters / 2**20:.0f} MiB with the moments, on {engine.state_summary()}")
    measure(engine, False, 2, 1)  # warm
    medians = {}
    for label, wait in (("no checkpoint", None), ("waiting", True), ("in the background", False)):
        saves, times, whole = measure(engine, wait, options.steps, options.every)
        medians[label] = median(saves) if saves else 0.0
        print(f"{label:>18}: save {medians[label]:.3f} s, step {median(times):.3f} s, loop {whole:.2f} s")
    print(f"the stall is {medians['waiting'] / medians['in the background']:.1f} times shorter")


if __name__ == "__main__":
    main()
