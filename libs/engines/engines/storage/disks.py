"""Which ranks see the same disk, and files for the disks that lack them.

Machines of a run may share a disk or have disks of their own. Each rank leaves a mark with a random name in the
directory and looks for those of the ranks before it: the first that it sees leads its disk. A name that nobody asked
for before is in no cache of a network file system.
"""

import hashlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from dyncp.comm.process_groups import world_timeout
from engines.storage.together import Group, gathered, this_rank, this_world_size, together

_CHUNK = 32 << 20
_ARRIVING = ".arriving"


@dataclass(frozen=True)
class Disks:
    """The disks that the ranks see: `leaders[r]` is the first rank that sees the disk of rank r."""

    leaders: tuple[int, ...]
    rank: int

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of its disk: the one that makes and moves directories."""
        return self.leaders[self.rank] == self.rank

    @property
    def own(self) -> list[int]:
        """The ranks that see this rank's disk."""
        return [rank for rank, leader in enumerate(self.leaders) if leader == self.leaders[self.rank]]

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return len(set(self.leaders)) > 1


def find_disks(directory: Path, group: Group = None) -> Disks:
    """Return which ranks see the same `directory`, which is made where it is missing. Collective.

    Where a rank can't write there, ranks of one machine count as one disk.
    """
    rank, size = this_rank(), this_world_size()
    if size == 1 or int(os.environ.get("LOCAL_WORLD_SIZE", size)) == size:
        return Disks((0,) * size, rank)
    token = gathered(group, secrets.token_hex(8))[0]
    marks = [directory / f".disk-{token}-{number}" for number in range(size)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        marks[rank].touch()
        written = True
    except OSError:
        written = False
    if all(gathered(group, written)):
        leaders = gathered(group, next(number for number, mark in enumerate(marks) if mark.exists()))
    else:
        machines = gathered(group, os.environ.get("GROUP_RANK", socket.gethostname()))
        leaders = [machines.index(machine) for machine in machines]
    marks[rank].unlink(missing_ok=True)
    return Disks(tuple(leaders), rank)


def share_files(directory: Path, disks: Disks, pattern: str = "**/*", hashed: bool = True) -> None:
    """Give each disk the files of `directory` that another one has, in place or not at all. Collective.

    Each file travels once, over a gloo group of the disks' first ranks, with its SHA-256. `pattern`: which files.
    `hashed`: compare what is on several disks already by its SHA-256; otherwise, from 1 MiB on, by its size.

    Raises:
        RuntimeError: a file is not the same on two disks, or can't be written; the text names machine and file.
    """
    _on_leaders(directory, disks, lambda group: _share(directory, _files(directory, pattern, (), hashed), None, group))


def mirror_files(directory: Path, disks: Disks, source: int, skip: Sequence[str] = ()) -> None:
    """Make `directory` on each disk what it is on that of the rank `source`, but for the entries `skip`. Collective.

    Raises:
        RuntimeError: a file can't be written; the text names machine and file.
    """

    def mirror(group: dist.ProcessGroup) -> None:
        own = _files(directory, "**/*", skip, True)
        first = disks.leaders[source]
        wanted = _share(directory, own, first, group)
        for name in own.keys() - wanted:
            (directory / name).unlink()

    _on_leaders(directory, disks, mirror)


def _on_leaders(directory: Path, disks: Disks, work: Callable[[dist.ProcessGroup], object]) -> None:
    """Run `work` on the first rank of each disk, where there are several, with a group of those."""
    if not disks.several:
        return
    leaders = sorted(set(disks.leaders))
    group = dist.new_group(leaders, backend="gloo", timeout=world_timeout())
    together(None, lambda: bool(disks.leads and work(group)), f"can't share {directory}")
    if disks.leads:
        dist.destroy_process_group(group)


def _files(directory: Path, pattern: str, skip: Sequence[str], hashed: bool) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of each file, by its path in the directory."""
    identities = {}
    for path in directory.glob(pattern):
        name = path.relative_to(directory)
        if path.is_file() and path.suffix != _ARRIVING and name.parts[0] not in skip:
            identities[str(name)] = _identity(path, hashed)
    return identities


def _share(
    directory: Path, own: Mapping[str, tuple[int, str]], source: int | None, group: dist.ProcessGroup
) -> set[str]:
    """Send each file to the ranks of the group that lack it, and return the names of all. `source`: the rank whose
    files count; without it those of all, which must not differ."""
    leaders = dist.get_process_group_ranks(group)
    listings = gathered(group, (socket.gethostname(), own))
    holding = [leaders.index(source)] if source is not None else range(len(leaders))
    names, problem = {name for number in holding for name in listings[number][1]}, None
    for name in sorted(names):
        holders = [number for number in holding if name in listings[number][1]]
        first = listings[holders[0]][1][name]
        for number in holders[1:]:
            if listings[number][1][name] != first:
                places = f"{listings[holders[0]][0]} and {listings[number][0]}"
                raise RuntimeError(f"{directory / name} is not the same on {places}: delete it on one of them")
        if any(files.get(name) != first for _, files in listings):
            lacks = own.get(name) != first
            problem = _travel(directory / name, first[0], leaders[holders[0]], lacks, group) or problem
    if problem is not None:
        raise RuntimeError(f"on {socket.gethostname()} {problem}")
    return names


def _travel(path: Path, size: int, source: int, lacks: bool, group: dist.ProcessGroup) -> str | None:
    """Send a file from one rank to the others, who write it where they lack it; return what went wrong here.

    A rank whose disk fails goes on receiving: the others count on it.
    """
    arriving, problem, digest = path.with_name(path.name + _ARRIVING), None, hashlib.sha256()
    mine = this_rank() == source
    chunks: Iterator[torch.Tensor] = _chunks(path, size) if mine else _empty(size)
    if lacks:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            arriving.write_bytes(b"")
        except OSError as error:
            problem = f"{path} can't be written: {error}"
    for chunk in chunks:
        dist.broadcast(chunk, src=source, group=group)
        data = chunk.numpy().tobytes()
        digest.update(data)
        if lacks and problem is None:
            try:
                with arriving.open("ab") as file:
                    file.write(data)
            except OSError as error:
                problem = f"{path} can't be written: {error}"
    wanted = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).clone()
    dist.broadcast(wanted, src=source, group=group)
    if wanted.numpy().tobytes() != digest.digest():
        problem = problem or f"{path} arrived with another SHA-256"
    if lacks and problem is None:
        try:
            os.replace(arriving, path)
        except OSError as error:
            problem = f"{path} can't be written: {error}"
    if problem is not None:
        with suppress(OSError):
            arriving.unlink()
    return problem


def _chunks(path: Path, size: int) -> Iterator[torch.Tensor]:
    with path.open("rb") as file:
        for start in range(0, size, _CHUNK):
            yield torch.frombuffer(bytearray(file.read(min(_CHUNK, size - start))), dtype=torch.uint8)


def _empty(size: int) -> Iterator[torch.Tensor]:
    for start in range(0, size, _CHUNK):
        yield torch.empty(min(_CHUNK, size - start), dtype=torch.uint8)


def _identity(path: Path, hashed: bool) -> tuple[int, str]:
    size = path.stat().st_size
    if not hashed and size >= 1 << 20:
        return size, ""
    with path.open("rb") as file:
        return size, hashlib.file_digest(file, "sha256").hexdigest()
