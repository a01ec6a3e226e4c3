"""Seconds of a weight sync shard to shard, from its bytes and the rates of the links that they pass.

A sync is phases, one after the other. In a phase every process sends and takes at once, so that it lasts as long as
the busiest link: `max(bytes out / rate, bytes in / rate)`, of which payload gets `SHARE`. Calls, packing and loading
count nothing: a small model, whose time they are, takes longer than this says.

What that says of figures that others published, with 400 Gb/s a GPU (ConnectX-7; NVIDIA DGX H100 data sheet) and two
bytes a parameter (`sync_time_test`):

- NeMo-RL, docs/design-docs/nccl-reshard-refit.md (commit 0505ac73), "Expected Performance": Qwen3.5-397B on H100,
  TP8 x PP8 x EP32 to TP16 x DP16, 97.4 % of the bytes shard to shard, in 1.97 to 2.17 s. The rest is gathered by the
  trainer and broadcast: every process takes it once in each phase. DeepSeek-V3, 671B, PP16 x EP16 to TP32 x DP8,
  97.6 %: 2.39 to 2.83 s.
- miles, docs/advanced/p2p-weight-transfer.md (commit 0933731e), "Profiling Results": Qwen3-235B-A22B, TP4 PP4 CP2 EP16
  on 8 nodes to TP32 EP32 on 8 nodes, in 3.162 s. Each rank gathers its stage, then writes to its targets.

Not near: on miles's page GLM-4.5-Air and GLM-5 took 1.6 and 1.9 times what this says, and NeMo-RL's model of 30B more
than twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass

SHARE = 0.9
"""Share of a line's rate that payload gets: packets have headers, and there are gaps between messages."""
NIC = 400e9 / 8
"""Bytes a second of a network card for each GPU, one way."""


@dataclass(frozen=True)
class Phase:
    """Bytes that pass at once: those of the busiest sender, and those of the busiest receiver."""

    sent: float
    taken: float

    @staticmethod
    def of_shards(nbytes: float, senders: int, receivers: int, parts: int) -> "Phase":
        """Return the phase in which each of `receivers` takes one of `parts` of the weights (tensor or expert
        parallelism) from `senders`, which have even loads."""
        taken = nbytes / parts
        return Phase(taken * receivers / senders, taken)

    @staticmethod
    def of_gather(nbytes: float, ranks: int) -> "Phase":
        """Return the phase in which each of `ranks` takes what it lacks of bytes that they hold in even parts."""
        lacking = nbytes * (ranks - 1) / ranks
        return Phase(lacking, lacking)

    @staticmethod
    def of_plan(traffic: Iterable[tuple[int, int]]) -> "Phase":
        """Return the phase of a plan: (bytes sent, bytes taken) of each process (`rollout.sync.SyncPlan.bytes_of`),
        or of each machine, whose processes share its link."""
        every = list(traffic)
        return Phase(max((sent for sent, _ in every), default=0), max((taken for _, taken in every), default=0))


def sync_seconds(phases: Iterable[Phase], send_rate: float, receive_rate: float | None = None) -> float:
    """Return the seconds of phases one after the other, over links of these bytes a second a process.

    `receive_rate`: the rate of the way in, where it is another one.

    Raises:
        ValueError: a rate is not above 0.
    """
    arriving = send_rate if receive_rate is None else receive_rate
    if send_rate <= 0 or arriving <= 0:
        raise ValueError(f"a link passes more than 0 bytes a second, got {send_rate} and {arriving}")
    return sum(max(one.sent / send_rate, one.taken / arriving) for one in phases) / SHARE
