"""Compile every Triton form for a GPU that need not be there: launches are caught, compiled for sm_90 and not made.

Run in a process of its own; prints one line for each launch: the kernel's name, the bytes of shared memory it wants,
and whether its products run on the tensor cores as warp-group instructions.
"""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from replayscope.kernels import attention_triton, compressor_triton, divergence_triton, index_triton, logits_triton
from replayscope.kernels.packed import EntryRows, WindowRows

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def compile_launch(self, *args, grid, warmup, **more) -> None:
    given = dict(zip(self.arg_names, args, strict=False)) | more
    signature, constants, attributes = {}, {}, {}
    for i, p in enumerate(self.params):
        value = given.pop(p.name)
        if p.is_constexpr or (isinstance(value, int) and value == 1):
            signature[p.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[p.name] = POINTERS[value.dtype]
        else:
            signature[p.name] = "i32" if isinstance(value, int) else "fp32"
        # As a launch does: loads of 16 bytes, and with them tiles that are copied ahead, are only made where both the
        # address and the strides allow them. Without this the shared memory would come out at half of what is wanted.
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if signature[p.name] != "constexpr" and isinstance(number, int) and number % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(self, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=given)
    print(self.fn.__name__, made.metadata.shared, "wgmma.mma_async" in made.asm["ptx"], flush=True)


def main() -> None:
    JITFunction.run = compile_launch
    at, bf16 = torch.zeros(2, dtype=torch.long), torch.bfloat16
    rows, entries = WindowRows(at, at, at, at, at), EntryRows(torch.zeros(2, 64, dtype=torch.long), at, at, at)
    for dim in (80, 512):
        kv, q = torch.zeros(4, dim, dtype=bf16), torch.zeros(2, 64, dim, dtype=bf16)
        attention_triton.packed_attention(q, kv, rows, 128, kv, entries, torch.zeros(64))
    x = torch.zeros(2, 304)
    divergence_triton.row_sums(x, x, 1e-6, 1e-3)
    logits_triton.logits_rows(x, x, at, 5)
    pool = torch.ones(2, 40, dtype=torch.bool)
    for heads, dim in ((32, 128), (64, 512)):
        q, keys = torch.zeros(2, heads, dim, dtype=bf16), torch.zeros(304, dim, dtype=bf16)
        index_triton.index_scores(q, torch.zeros(2, heads), [keys], at, pool, 8)
    index_triton.topk_entries(x, 16)
    pair = torch.zeros(2, 2, 80)
    compressor_triton.compress_pairs(pair, pair, torch.zeros(80), 1e-20, bf16)


if __name__ == "__main__":
    main()
