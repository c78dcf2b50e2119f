"""Cases of window and selected-global attention over packed rows."""

import math

import torch
from torch import Tensor

from replayscope.kernels.attention import packed_attention
from replayscope.kernels.packed import EntryRows, WindowRows
from tests.triton_table import TOLERANCE, case, same


class Packed:
    """Rows of two requests, one of which reads below its start from the other; all that none may read is NaN."""

    def __init__(self, rows: int, heads: int, dim: int, window: int, picks: int, device, dtype, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        # Long windows are met where they fill up.
        position = torch.arange(rows) + torch.randint(0, 3, (rows,), generator=g) + max(window - rows, 0)
        floor = torch.where(torch.arange(rows) % 3 == 1, position - window // 2, 0)
        start = torch.where(torch.arange(rows) % 2 == 0, 0, position - 1)
        own, below = torch.full((rows,), rows + window + 7), torch.full((rows,), 2)
        self.window, self.rows = window, WindowRows(position, floor, start, own, below)
        entries = torch.randint(0, 20, (rows, picks), generator=g)
        # Lists end in absent ones, as the top-k's do; one row has none at all.
        entries[torch.rand(rows, picks, generator=g) < 0.3] = -1
        entries[rows // 2] = -1
        self.entries = EntryRows(entries, torch.full((rows,), 9), torch.full((rows,), 1), torch.full((rows,), 4))
        self.q = torch.randn(rows, heads, dim, generator=g)
        self.sink = torch.randn(heads, generator=g)
        self.kv, self.glob = (
            self._poisoned(slots, dim, g) for slots in (self.rows.slots(window), self.entries.slots())
        )
        self.device, self.dtype = device, dtype

    @staticmethod
    def _poisoned(slots: Tensor, dim: int, g: torch.Generator) -> Tensor:
        listed = slots[slots >= 0].unique()
        pool = torch.full((int(slots.max().clamp(min=0)) + 3 if slots.numel() else 3, dim), math.nan)
        pool[listed] = torch.randn(len(listed), dim, generator=g)
        return pool

    def attend(self, impl: str) -> Tensor:
        rows = WindowRows(*(t.to(self.device) for t in vars(self.rows).values()))
        entries = EntryRows(*(t.to(self.device) for t in vars(self.entries).values()))
        q, kv, glob = (t.to(self.device, self.dtype) for t in (self.q, self.kv, self.glob))
        return packed_attention(q, kv, rows, self.window, glob, entries, self.sink.to(self.device), impl)

    def check(self) -> Tensor:
        got = self.attend("triton")
        same("attention", got, self.attend("torch"), TOLERANCE["attention", self.dtype])
        return got


# E8: every head_dim, powers of two or not; A12, A18: window boundaries of the model and of a tile of 32 or 64 keys.
SHAPES = [
    (1, 1, 16, 1, 0), (6, 3, 24, 4, 3), (5, 17, 64, 3, 40), (3, 2, 80, 5, 33), (3, 2, 96, 2, 1), (4, 3, 128, 40, 31),
    (3, 5, 160, 7, 2), (2, 4, 512, 3, 5), (5, 1, 16, 31, 65), (5, 2, 16, 32, 64), (5, 2, 16, 33, 1), (5, 1, 16, 63, 0),
    (5, 1, 16, 65, 7), (7, 1, 16, 7, 2), (3, 2, 16, 128, 2),
]  # fmt: skip


def _shape(rows: int, heads: int, dim: int, window: int, picks: int) -> None:
    @case(f"attention rows={rows} heads={heads} dim={dim} window={window} picks={picks}")
    def check(device, dtype):
        Packed(rows, heads, dim, window, picks, device, dtype).check()


for shape in SHAPES:
    _shape(*shape)


@case("attention floors")
def _(device, dtype):
    p = Packed(9, 2, 16, 6, 2, device, dtype)
    for floor in (0, 5, 6, 8, 99):
        p.rows = WindowRows(p.rows.position, torch.full((9,), floor), *(torch.zeros(9, dtype=torch.long),) * 3)
        p.kv = Packed._poisoned(p.rows.slots(6), 16, torch.Generator().manual_seed(1))
        out = p.check()
    # Nobody sees a window key now, and one row has no entry either.
    assert (out[4] == 0).all() and (out != 0).any()


@case("attention sinks and huge scores")
def _(device, dtype):
    p = Packed(6, 5, 16, 4, 3, device, dtype)
    p.sink = torch.tensor([0.0, -math.inf, math.inf, 50.0, -50.0])
    out = p.check()
    assert (out[:, 2] == 0).all() and (out[3] == 0).sum() == 16 * 1 + int((out[3, 3] == 0).sum())
    # Scores of tens of thousands, apart by more than the exponential's range: the largest takes all.
    p.kv = torch.where(torch.isnan(p.kv), p.kv, (torch.arange(len(p.kv)) % 7 * 64.0)[:, None])
    p.q, p.entries = torch.full_like(p.q, 128.0), replace_picks(p.entries, -1)
    p.check()


def replace_picks(entries: EntryRows, value: int) -> EntryRows:
    return EntryRows(torch.full_like(entries.picks, value), entries.kept, entries.other, entries.own)


@case("attention all-masked tiles")
def _(device, dtype):
    p = Packed(4, 2, 16, 3, 200, device, dtype)
    # 64 absent ones and more before, between and behind those that are there.
    p.entries.picks[:, :70], p.entries.picks[:, 75:150], p.entries.picks[:, 153:] = -1, -1, -1
    p.check()
    p.entries = replace_picks(p.entries, -1)
    p.check()


@case("attention uniform weights (A6)")
def _(device, dtype):
    rows = torch.arange(8, device=device)
    for window, want in ((4, [1, 2, 3, 4, 4, 4, 4, 4]), (1, [1] * 8), (8, list(range(1, 9))), (99, list(range(1, 9)))):
        eye = torch.eye(8, 16, device=device, dtype=dtype)
        w = WindowRows(rows, rows * 0, rows * 0, rows * 0, rows * 0)
        sink = torch.full((1,), -math.inf, device=device)
        out = packed_attention(
            torch.zeros(8, 1, 16, device=device, dtype=dtype), eye, w, window, None, None, sink, "triton"
        )
        assert (out[:, 0] > 0).sum(1).tolist() == want, f"window {window} sees {(out[:, 0] > 0).sum(1).tolist()}"
        assert (out[7, 0, :8].sum() - 1).abs() < 1e-2


@case("attention reads all of head_dim (E8)")
def _(device, dtype):
    p = Packed(3, 2, 128, 3, 2, device, dtype)
    p.q[..., :64], p.kv[..., :64], p.glob[..., :64] = 0, 0, 0
    first = p.check()
    p.kv[..., 64:] *= 1.5
    assert not torch.equal(p.check(), first)
    try:
        Packed(1, 1, 513, 1, 1, device, dtype).attend("triton")
    except ValueError as error:
        assert "head_dim 513 is more than 512; use torch" in str(error)
    else:
        raise AssertionError("a head_dim of 513 ran")


@case("attention of views (E12)")
def _(device, dtype):
    p = Packed(5, 3, 24, 4, 3, device, dtype)
    want = p.attend("triton")
    p.q, p.kv, p.glob = (t.to(device, dtype) for t in (p.q, p.kv, p.glob))
    p.q = p.q.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.full((2 * len(p.kv), 2 * 24), math.nan, device=device, dtype=dtype)
    wide[::2, ::2] = p.kv
    p.kv, p.glob = wide[::2, ::2], p.glob.T.contiguous().T
    p.entries.picks.set_(p.entries.picks.T.contiguous().T)
    same("views", p.attend("triton"), want)
    p.q = p.q[:, :1].expand(-1, 3, -1)
    p.check()
