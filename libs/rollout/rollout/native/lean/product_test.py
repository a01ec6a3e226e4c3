"""Products of many tokens: the same numbers, whichever library makes them."""

from collections.abc import Iterator

import pytest
import torch

from rollout.native.lean import product as product_module
from rollout.native.lean.model_weights import Projection
from rollout.native.lean.product import (
    LEAST_PACKED,
    LEAST_PACKED_INTEL,
    MIN_ROWS,
    READ_ONCE,
    WORTHWHILE,
    WORTHWHILE_PACKED,
    Matrix,
    product,
    worthwhile,
)

LARGE = (64, 128, WORTHWHILE // (64 * 128))


def drawn(rows: int, inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    torch.manual_seed(outputs)
    return (torch.randn(s, dtype=dtype) for s in ((rows, inputs), (outputs, inputs), (outputs,)))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [LARGE, (1, 128, 256), (MIN_ROWS, 512, 1024), (13, 24, 7)])
@pytest.mark.parametrize("intel", [True, False])
def test_is_the_product_to_the_last_bits(
    shape: tuple[int, int, int], biased: bool, intel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_module, "INTEL", intel)
    x, w, b = drawn(*shape)
    got = product(x, w, b if biased else None)
    exact = x.double() @ w.double().t() + (b.double() if biased else 0)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-6 * shape[1] ** 0.5 * 8)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_only_large_float32_products_go_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, _ = drawn(*LARGE)
    monkeypatch.setattr(product_module, "INTEL", True)
    assert not worthwhile(x, w.shape[0])
    monkeypatch.setattr(product_module, "INTEL", False)
    assert worthwhile(x, w.shape[0])
    assert not worthwhile(x, w.shape[0] - 1)
    assert not worthwhile(x.double(), w.shape[0])
    assert not worthwhile(x.bfloat16(), w.shape[0])
    assert not worthwhile(x[: MIN_ROWS - 1], 1 << 20)


PROCESSORS = [(True, False), (False, False), (True, True), (False, True)]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(129, 512), (512, 129), (512, 1040), (2, 40_000), (24, 7), (1, 70_000)])
@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64])
@pytest.mark.parametrize(("avx512", "intel"), PROCESSORS)
@pytest.mark.usefixtures("threads")
def test_a_matrix_takes_any_number_of_tokens(
    rows: int, shape: tuple[int, int], dtype: torch.dtype, avx512: bool, intel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a sum of rows, by a plain product or by oneDNN, alone and added to something: the same numbers."""
    monkeypatch.setattr(product_module, "AVX512", avx512)
    monkeypatch.setattr(product_module, "INTEL", intel)
    x, w, b = drawn(rows, shape[0], shape[1], dtype)
    matrix, exact = Matrix.of(w), x.double() @ w.double().t()
    kept, h = x.clone(), torch.randn(rows, shape[1]).to(dtype)
    bound = {torch.float32: 8e-6, torch.float64: 1e-13, torch.bfloat16: 0.1}[dtype] * shape[0] ** 0.5
    for shift in (None, b, h):
        before = x if shift is None else shift.clone()
        got = matrix(x, shift)
        assert got.dtype == dtype
        wanted = exact if shift is None else exact + shift.double()
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=bound)
        assert shift is None or shift.equal(before)
    assert x.equal(kept)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize(("avx512", "intel"), PROCESSORS)
def test_who_multiplies_goes_by_rows_and_size(avx512: bool, intel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(product_module, "AVX512", avx512)
    monkeypatch.setattr(product_module, "INTEL", intel)
    for name in ("_read_once", "onednn_linear"):

        def noted(x: torch.Tensor, *rest: object, name: str = name) -> torch.Tensor:
            asked.append(name)
            return torch.zeros(x.shape[0], 1)

        monkeypatch.setattr(product_module, name, noted)

    def who(rows: int, inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> str | None:
        asked.clear()
        x, w, _ = drawn(rows, inputs, outputs, dtype)
        Matrix.of(w)(x)
        return asked[0] if asked else None

    assert who(1, 512, READ_ONCE // 512) == (None if intel else "_read_once")
    assert who(1, 512, READ_ONCE // 512 - 1) is None
    assert who(1, 256, 1024) == ("_read_once" if avx512 and not intel else None)
    assert who(1, 1024, 512) == ("_read_once" if avx512 and not intel else None)
    assert who(1, 512, READ_ONCE // 512, torch.float64) is None
    assert who(4, 1024, LEAST_PACKED_INTEL // 1024) == "onednn_linear"
    assert who(4, 256, WORTHWHILE_PACKED // 1024, torch.float64) is None
    if intel:
        assert who(512, 1024, LEAST_PACKED_INTEL // 1024 - 1) is None
        return
    assert who(4, 256, WORTHWHILE_PACKED // 1024) == "onednn_linear"
    assert who(4, 256, WORTHWHILE_PACKED // 1024 - 1) is None
    assert who(512, 256, LEAST_PACKED // 256) == "onednn_linear"
    assert who(512, 256, LEAST_PACKED // 256 - 1) == ("onednn_linear" if avx512 else None)
    assert who(64, 64, WORTHWHILE // (64 * 64)) == ("onednn_linear" if avx512 else None)
    assert who(64, 64, WORTHWHILE // (64 * 64) - 1) is None


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize(("outputs", "shape"), [(512, (400, 512)), (513, (2, 400, 272)), (1040, (3, 400, 352))])
def test_rows_that_are_summed_are_short(outputs: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_module, "AVX512", True)
    monkeypatch.setattr(product_module, "INTEL", False)
    matrix = Matrix.of(torch.randn(outputs, 400))
    assert matrix.sums
    assert matrix.columns.shape == shape


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("join", [True, False])
def test_a_projection_of_many_tokens_is_that_of_each(join: bool, biased: bool, scaled: bool) -> None:
    """One token goes to the other library, by the transposed matrix."""
    x, w, b = drawn(*LARGE)
    parts = [(w[:100], b[:100] if biased else None), (w[100:], None)]
    factor = torch.linspace(0.5, 2, LARGE[1]) if scaled else None
    projection = Projection.of(parts, factor, join)
    for many, *each in zip(projection(x), *(projection(row) for row in x.split(1)), strict=True):
        torch.testing.assert_close(many, torch.cat(each), rtol=0, atol=1e-4)
    whole = Projection.of([(w, b if biased else None)], factor, join)
    h = torch.randn(LARGE[0], LARGE[2])
    each = [whole.added_to(a, row) for a, row in zip(h.split(1), x.split(1), strict=True)]
    torch.testing.assert_close(whole.added_to(h, x), torch.cat(each), rtol=0, atol=1e-4)
