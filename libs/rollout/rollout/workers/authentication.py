"""Proof that the processes of a group know the run's secret, before anything else passes between them.

Each process draws a number and shows it to all (challenge); each then answers with the HMAC-SHA256, by the secret, of
its own rank and all of these numbers (RFC 2104). A process that does not know the secret cannot answer, an old answer
fits no new numbers, and one rank's answer is not another's. The secret itself is never sent. What results is a key of
this meeting alone, with which messages are authenticated.
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a launcher imports this, and no torch
    import torch.distributed as dist

SECRET = "TESSERA_GROUP_SECRET"
"""Environment variable of the run's secret: the launcher makes it (`make_secret`); several machines are given one."""
MAC_BYTES = 32
Exchange = Callable[[str, bytes], list[bytes]]
"""Function that gives all processes' bytes of a step, by rank, for this process's own."""


class AuthenticationError(RuntimeError):
    """A process of the group does not know the run's secret: nothing is sent to it, and nothing taken from it."""


def make_secret(environment: MutableMapping[str, str] | None = None) -> None:
    """Set the secret of a run in the environment of its processes, unless it has one; a launcher calls it."""
    variables = os.environ if environment is None else environment
    variables.setdefault(SECRET, secrets.token_hex(32))


def run_secret() -> bytes:
    """Return the run's secret.

    Raises:
        ValueError: the launcher made none.
    """
    secret = os.environ.get(SECRET, "")
    if len(secret) < 32:
        raise ValueError(
            f"the processes of a run authenticate by a secret: set {SECRET} to the same random text of at least 32 "
            f"characters on every machine, say of `openssl rand -hex 32` (it has {len(secret)} characters)"
        )
    return secret.encode()


def authenticate(exchange: Exchange, rank: int, secret: bytes) -> bytes:
    """Prove to all processes of a group that this one knows the secret, and that they do; return the meeting's key.

    Raises:
        AuthenticationError: one of them does not; it is named.
    """
    numbers = exchange("challenge", secrets.token_bytes(MAC_BYTES))
    said = hashlib.sha256(b"".join(numbers) + len(numbers).to_bytes(4, "big")).digest()
    answers = exchange("answer", mac(secret, b"answer", rank.to_bytes(4, "big"), said))
    for other, answer in enumerate(answers):
        if not hmac.compare_digest(answer, mac(secret, b"answer", other.to_bytes(4, "big"), said)):
            raise AuthenticationError(
                f"process {other} of {len(answers)} does not know the run's secret ({SECRET}): nothing was sent"
            )
    return mac(secret, b"key", said)


def mac(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of parts, which cannot be cut elsewhere."""
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(key, text, hashlib.sha256).digest()


def exchange_in_store(store: "dist.Store", rank: int, size: int, limit: timedelta) -> Exchange:
    """Return an exchange through a store, before there is a group; the store's timeout bounds each wait."""

    def exchange(step: str, mine: bytes) -> list[bytes]:
        store.set(f"{step} {rank}", mine.hex())
        store.wait([f"{step} {other}" for other in range(size)], limit)
        every = [store.get(f"{step} {other}").decode() for other in range(size)]
        try:
            return [bytes.fromhex(one) for one in every]
        except ValueError as error:
            raise AuthenticationError(f"a process said something that is no {step}") from error

    return exchange
