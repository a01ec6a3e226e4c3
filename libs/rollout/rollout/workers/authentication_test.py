"""Only processes that know the secret meet; nothing that one could overhear or repeat lets another one in."""

import hashlib
import hmac
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from rollout.workers.authentication import (
    SECRET,
    AuthenticationError,
    Exchange,
    authenticate,
    exchange_in_store,
    mac,
    make_secret,
    run_secret,
)

LIMIT = timedelta(seconds=20)
GOOD = b"a secret of more than thirty-two characters"


def meet(secrets: list[bytes], store: dist.Store | None = None) -> list[bytes | BaseException]:
    """What each process gets: the key, or its error."""
    shared = store or dist.HashStore()

    def one(rank: int) -> bytes | BaseException:
        try:
            return authenticate(exchange_in_store(shared, rank, len(secrets), LIMIT), rank, secrets[rank])
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(len(secrets)) as pool:
        return list(pool.map(one, range(len(secrets))))


def test_processes_that_know_the_secret_share_a_key_of_their_own() -> None:
    first, second = meet([GOOD] * 3), meet([GOOD] * 3)
    assert len(set(first)) == len(set(second)) == 1
    assert isinstance(first[0], bytes)
    assert first[0] != second[0], "an old meeting's key opens nothing later"


@pytest.mark.parametrize("stranger", [0, 1, 2])
def test_a_process_with_another_secret_is_named_and_gets_no_key(stranger: int) -> None:
    found = meet([GOOD if rank != stranger else GOOD + b"!" for rank in range(3)])
    assert all(isinstance(one, AuthenticationError) for one in found)
    for rank, error in enumerate(found):
        if rank != stranger:
            assert f"process {stranger} of 3 does not know" in str(error)


def test_no_secret_passes_through_the_store_and_another_rank_s_answer_is_none() -> None:
    """A stranger that sees everything repeats what the others said: its own answer fits neither number nor rank."""
    said: dict[tuple[int, str], bytes] = {}
    store = dist.HashStore()

    def listened(rank: int, exchange: Exchange) -> Exchange:
        def both(step: str, mine: bytes) -> list[bytes]:
            said[rank, step] = mine
            return exchange(step, mine)

        return both

    def honest(rank: int) -> BaseException | bytes:
        try:
            return authenticate(listened(rank, exchange_in_store(store, rank, 3, LIMIT)), rank, GOOD)
        except RuntimeError as error:
            return error

    def stranger() -> None:
        exchange = exchange_in_store(store, 2, 3, LIMIT)
        numbers = exchange("challenge", b"x" * 32)
        while (0, "answer") not in said:
            time.sleep(0.01)
        assert numbers[2] == b"x" * 32
        exchange("answer", said[0, "answer"])

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(honest, 0), pool.submit(honest, 1)]
        pool.submit(stranger).result(60)
        errors = [future.result(60) for future in futures]
    assert all(isinstance(error, AuthenticationError) and "process 2 of 3" in str(error) for error in errors)
    assert not any(GOOD in value for value in said.values())


def test_what_is_no_answer_at_all_is_refused() -> None:
    store = dist.HashStore()
    store.set("challenge 1", "not hexadecimal")
    with pytest.raises(AuthenticationError, match="said something that is no challenge"):
        authenticate(exchange_in_store(store, 0, 2, LIMIT), 0, GOOD)


def test_macs_are_hmac_sha256_of_parts_that_cannot_be_cut_elsewhere() -> None:
    text = b"\x00\x00\x00\x02ab\x00\x00\x00\x01c"
    assert mac(b"key", b"ab", b"c") == hmac.new(b"key", text, hashlib.sha256).digest()
    assert mac(b"key", b"ab", b"c") != mac(b"key", b"a", b"bc")


def test_a_launcher_makes_one_secret_and_keeps_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, str] = {}
    make_secret(made)
    assert len(made[SECRET]) == 64
    before = dict(made)
    make_secret(made)
    assert made == before
    for value in ("", "short"):
        monkeypatch.setenv(SECRET, value)
        with pytest.raises(ValueError, match=f"set {SECRET} to the same random text"):
            run_secret()
    monkeypatch.setenv(SECRET, made[SECRET])
    assert run_secret() == made[SECRET].encode()
