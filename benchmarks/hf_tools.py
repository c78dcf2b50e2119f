"""Hugging Face models beside nnsight and transformer_lens, where they are installed: `python benchmarks/hf_tools.py`.

Prints one JSON object a line, as run.py does. Both cases run on a random Gemma 2, which all can run: `hf-record` on one
of the size of GPT-2, `hf-sweep` on a smaller one, since the obvious loop takes long.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# As the command line does: threads that wait by spinning take the time of those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from cases import emptied
from harness import Case, Contest, environment, run_case
from torch import Tensor

from replayscope.inspector.capture import Capture
from replayscope.inspector.hf_executor import HFExecutor
from replayscope.inspector.lineup import Job, line_up
from replayscope.inspector.plan import Plan
from replayscope.inspector.runner import run
from replayscope.inspector.semantics import Shape, request
from replayscope.kernels.divergence import row_sums
from replayscope.model.hf import HFModel, placed, say_less
from replayscope.model.hf_config import map_config
from replayscope.traces.queued import QueuedWriter
from replayscope.traces.schema import Tokens
from replayscope.traces.writer import TraceWriter

N, W, SUFFIX, LAYERS, VOCAB = 768, 32, 32, 6, 1000
CUTS = tuple(range(64, 64 + 64 * 10, 10))
# Other kernels and other batch sizes sum in other orders; the residual stream grows with every layer.
ROUNDING = 1e-4


def model(layers: int = LAYERS, width: int = 256) -> HFModel:
    """The same random weights every time."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(vocab_size=VOCAB, hidden_size=width, num_hidden_layers=layers, head_dim=64,
                                       num_attention_heads=width // 64, num_key_value_heads=2,
                                       intermediate_size=2 * width, sliding_window=W,
                                       max_position_embeddings=1024)  # fmt: skip
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    return placed(module, map_config(config), torch.float32)


def prompt() -> Tensor:
    return torch.randint(3, VOCAB, (N,), generator=torch.Generator().manual_seed(1))


def record(device: torch.device) -> Contest:
    """Every layer's hidden states of one prefill, on disk and synced."""
    size = (12, 768)
    ours, ids = model(*size), prompt()
    held = tempfile.TemporaryDirectory(prefix="replayscope-bench-")
    folder = Path(held.name)
    kept: dict[str, list[Tensor]] = {}

    def replayscope() -> None:
        plan = Plan((request(Shape(ours.config, N), "full"),))
        executor = HFExecutor(ours, block=N)
        line, _ = line_up(Job(Shape(ours.config, N), ()))
        states: list[Tensor] = []
        with QueuedWriter(TraceWriter(folder / "t.h5", force=True)) as out:
            out.header(config=ours.config.to_dict(), provenance={}, tokens=Tokens(ids.numpy(), [""] * N))
            out.runs(line.runs)

            def write(_: int, name: str, found: Any) -> None:
                states.append(found.values)
                out.state(0, name, found.positions.numpy(), found.values.numpy(), "float32")

            with Capture(executor, ["layers.*.hidden"], write):
                for _ in executor.run(plan, {"prompt": ids}):
                    pass
        kept["replayscope"] = states

    def save(name: str, states: list[Tensor]) -> None:
        with (folder / name).open("wb") as file:
            torch.save(states, file)
            file.flush()
            os.fsync(file.fileno())
        kept[name] = states

    variants: dict[str, Callable[[], object]] = {"replayscope": replayscope}
    # Each has a model of its own, with the same weights: the others wrap its modules and leave them so.
    if find_spec("nnsight"):
        variants["nnsight"] = _nnsight(model(*size), ids, save)
    if find_spec("transformer_lens"):
        variants["transformer_lens"] = _transformer_lens(model(*size), ids, save)

    def check() -> None:
        for call in variants.values():
            call()
        for name, states in kept.items():
            assert len(states) == size[0], f"{name} has {len(states)} of {size[0]} layers"
            for mine, other in zip(kept["replayscope"], states, strict=True):
                off = float((mine - other.reshape(mine.shape)).abs().max() / mine.abs().max())
                assert off < ROUNDING, f"{name} is off by {off:.0e}"

    return Contest(variants, check, work=N, unit="rows", before=emptied(held))


def _nnsight(ours: HFModel, ids: Tensor, save: Any) -> Any:
    nnsight = import_module("nnsight")
    wrapped = nnsight.NNsight(ours.module)

    def call() -> None:
        with torch.no_grad(), wrapped.trace(input_ids=ids[None]):
            found = nnsight.save([layer.output for layer in wrapped.model.layers])
        save("nnsight", [(x if isinstance(x, Tensor) else x[0]).clone() for x in found])

    return call


def _transformer_lens(ours: HFModel, ids: Tensor, save: Any) -> Any:
    bridges = import_module("transformer_lens.model_bridge")
    bridge = bridges.TransformerBridge.boot_transformers(
        _folder(ours), hf_model=ours.module, device="cpu", dtype=torch.float32
    )
    names = [f"blocks.{l}.hook_out" for l in range(ours.config.num_hidden_layers)]

    def call() -> None:
        with torch.no_grad():
            _, cache = bridge.run_with_cache(ids[None], names_filter=names)
        save("transformer_lens", [cache[name] for name in names])

    return call


def _folder(ours: HFModel) -> str:
    """A folder with the model and some tokenizer, by which the other tool knows it."""
    from tokenizers import Tokenizer, models

    folder = tempfile.mkdtemp()
    ours.module.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<bos>": 1, "<eos>": 2}, unk_token="<unk>"))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", eos_token="<eos>")
    made.save_pretrained(folder)
    return folder


class _Kept(transformers.DynamicCache):
    """The cache of the sensible loop: a kept prefix in global layers, nothing in window layers."""

    def __init__(self, prefix: dict[int, tuple[Tensor, Tensor]], cut: int, start: int) -> None:
        super().__init__()
        self.prefix, self.cut, self.start = prefix, cut, start

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx not in self.prefix:
            return key_states, value_states
        pairs = zip(self.prefix[layer_idx], (key_states, value_states), strict=True)
        return tuple(torch.cat((old[:, :, : self.cut], new[:, :, self.cut - self.start :]), 2) for old, new in pairs)


class _Keeping(transformers.DynamicCache):
    """Keeps what a prefill computes in global layers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.prefix = config, {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self.config.role(layer_idx) == "global":
            self.prefix[layer_idx] = key_states, value_states
        return key_states, value_states


def sweep(device: torch.device) -> Contest:
    """64 cuts: encoder replay of one window and 32 tokens behind it, hidden states compared with the prefill's."""
    ours, ids = model(), prompt()
    job = Job(Shape(ours.config, N), ("encoder",), CUTS, (W,), SUFFIX, points=("hidden",))
    line, _ = line_up(job)
    results: dict[str, list[float]] = {}

    def replayscope() -> None:
        fold, _ = run(ours, ids, job, line, HFExecutor(ours))
        cells = fold.tables["full", "hidden"].arrays["diff2"][1:, :, 0]
        results["replayscope"] = cells.sum(1).tolist()

    def hidden(first: int, stop: int, cache: Any, masks: Any) -> list[Tensor]:
        out = ours.module(input_ids=ids[None, first:stop], position_ids=torch.arange(first, stop)[None], cache=cache,
                          attention_mask=masks, use_cache=cache is not None, output_hidden_states=True)  # fmt: skip
        return [x[0] for x in out.hidden_states[1:LAYERS]]

    def mask(first: int, stop: int, lowest: int, window: int) -> Tensor:
        row, key = torch.arange(first, stop)[:, None], torch.arange(lowest, stop)[None]
        seen = (key <= row) & (row - key < window)
        return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]

    def masks(first: int, stop: int) -> dict[str, Tensor]:
        return {"full_attention": mask(first, stop, 0, N), "sliding_attention": mask(first, stop, first, W)}

    @torch.no_grad()
    def sensible() -> None:
        keeping = _Keeping(ours.config)
        full = hidden(0, N, keeping, masks(0, N))
        found = []
        for cut in CUTS:
            first, stop = cut - W, cut + SUFFIX
            own = hidden(first, stop, _Kept(keeping.prefix, cut, first), masks(first, stop))
            sums = [row_sums(a, b[first:stop])["diff2"].sum() for a, b in zip(own, full, strict=True)]
            found.append(float(sum(sums)))
        results["sensible loop"] = found

    @torch.no_grad()
    def obvious() -> None:
        for _ in CUTS:
            hidden(0, N, None, None)

    def check() -> None:
        replayscope()
        sensible()
        # The last layer's state is behind the final norm where transformers hands it out, so the loop leaves it out.
        fold, _ = run(ours, ids, job, line, HFExecutor(ours))
        mine = fold.tables["full", "hidden"].arrays["diff2"][1:, : LAYERS - 1, 0].sum(1)
        for a, b in zip(mine.tolist(), results["sensible loop"], strict=True):
            assert abs(a - b) <= ROUNDING * abs(b), f"the loops disagree: {a} and {b}"

    variants: dict[str, Callable[[], object]] = {"replayscope": replayscope, "sensible loop": sensible}
    variants["obvious loop"] = obvious
    return Contest(variants, check, work=len(CUTS), unit="cuts")


CASES = [
    Case(
        "hf-record", "every layer's hidden states of one prefill, on disk and synced", "replayscope", record, ("cpu",)
    ),
    Case("hf-sweep", "64 cuts of one prompt, hidden states compared", "obvious loop", sweep, ("cpu",)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Hugging Face models beside other tools.")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    say_less(0)
    device = torch.device("cpu")
    tools = ("transformers", "nnsight", "transformer_lens")
    missing = [name for name in tools if not find_spec(name)]
    print(json.dumps({**environment(device), "missing": missing}))
    for case in CASES:
        if not options.case or case.name in options.case:
            for line in run_case(case, device, options.rounds):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
