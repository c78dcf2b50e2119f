"""Packed cache rows against the rounding of the model, and against bytes written by hand."""

import numpy as np
import pytest
import torch

from replayscope.inspector.errors import UsageError
from replayscope.inspector.unpack import LAYOUTS, e2m1_pairs, unpack
from replayscope.model import rounding

ROUND = {"window": rounding.round_window, "main": rounding.round_main, "index": rounding.round_index}
_CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pack(values: torch.Tensor, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers [row, byte] and scales [row, scale] of rows, written from the format's definition: scale 2^k or e4m3 of
    the block's largest value, e2m1 with the even channel in the low half."""
    layout = LAYOUTS[name]
    blocks = values.float().unflatten(-1, (-1, layout.block))
    amax = blocks.abs().amax(-1)
    if name == "main":
        scale = (amax / 6).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    else:
        scale = torch.exp2(torch.ceil(torch.log2(amax / (6 if layout.fp4 else 448)))).to(torch.float8_e8m0fnu)
    unit = (blocks / scale.float()[..., None]).flatten(-2)
    if not layout.fp4:
        data = unit.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        size = torch.tensor(_CODES)
        code = (unit.abs()[..., None] - size).abs().argmin(-1) + 8 * torch.signbit(unit)
        data = (code[..., 0::2] | (code[..., 1::2] << 4)).to(torch.uint8)
    return data.numpy(), scale.view(torch.uint8).numpy()


def drawn(name: str, rows: int = 12) -> torch.Tensor:
    """Random rows of sizes from 1e-3 to 1e3."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.exp(torch.linspace(-7, 7, rows))[:, None]
    return torch.randn(rows, LAYOUTS[name].width, generator=generator) * spread


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_what_the_model_rounds_to(name):
    want = ROUND[name](drawn(name))
    packed = np.concatenate(pack(drawn(name), name), 1)
    assert packed.shape[1] == {"window": 528, "main": 288, "index": 68}[name]
    assert np.array_equal(unpack(packed, name), want.numpy())


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("padding", [0, 48])
def test_pages_hold_all_numbers_and_then_all_scales(name, padding):
    want = ROUND[name](drawn(name))
    data, scales = pack(drawn(name), name)
    pages = np.concatenate(
        [data.reshape(3, -1), scales.reshape(3, -1), np.full((3, padding), 7, np.uint8)], 1
    )  # three pages of four rows
    assert np.array_equal(unpack(pages, name, page=4), want.numpy())
    assert np.array_equal(unpack(pages[:, None, None], name, page=4), want.numpy())


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_page_read_as_rows_or_with_a_wrong_bit_is_not_the_same(name):
    want = ROUND[name](drawn(name))
    data, scales = pack(drawn(name), name)
    pages = np.concatenate([data.reshape(3, -1), scales.reshape(3, -1)], 1)
    assert not np.array_equal(unpack(pages.reshape(12, -1), name), want.numpy())
    for at, flips in ((0, 1), (-1, LAYOUTS[name].block)):
        rows = np.concatenate((data, scales), 1)
        rows[0, at] ^= 1
        assert 1 <= (unpack(rows, name) != want.numpy()).sum() <= flips


def test_codes_by_hand():
    assert e2m1_pairs(np.array([[0x21, 0xF7]], np.uint8)).tolist() == [[0.5, 1.0, 6.0, -6.0]]
    row = np.zeros((1, 68), np.uint8)
    row[0, 1], row[0, 17], row[0, 64:] = 0x80, 0x02, (127, 128, 255, 0)
    values = unpack(row, "index")[0]
    assert values[34] == 2.0 and values[2] == 0 and np.signbit(values[3]) and not np.signbit(values[2])
    assert np.isnan(values[64:96]).all() and not values[96:].any()
    row = np.zeros((1, 288), np.uint8)
    row[0, 0], row[0, 256] = 0x01, 0x38  # one half, times e4m3 1.0
    assert unpack(row, "main")[0, :2].tolist() == [0.5, 0.0]


@pytest.mark.parametrize(
    ("packed", "name", "page", "says"),
    [
        (np.zeros((2, 527), np.uint8), "window", None, "a packed window row has 528 bytes, got 527"),
        (np.zeros((2, 528), np.float32), "window", None, "are bytes"),
        (np.zeros(528, np.uint8), "window", None, "are bytes"),
        (np.zeros((2, 4 * 288 - 1), np.uint8), "main", 4, "a page of 4 packed main rows has at least 1152 bytes"),
        (np.zeros((2, 68), np.uint8), "indx", None, "did you mean 'index'"),
    ],
)
def test_what_does_not_fit_is_refused(packed, name, page, says):
    with pytest.raises(UsageError, match=says):
        unpack(packed, name, page)
