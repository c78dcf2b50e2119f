"""What a use case is asked for and what it hands back. No torch, so that the command line can fill it quickly.

Specs whose meaning depends on the model or the prompt (cuts, replay lengths, hook points, arms) stay text here, already
checked for form; the use case reads them with `replayscope.inspector.specs` and `.points` once both are loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replayscope.inspector.prompts import Prompt

# What `import` reads.
FORMATS = ("sglang-dump", "vllm-hidden", "folder")


@dataclass(frozen=True)
class Common:
    """Options of every command that runs a model.

    device: `auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:N`. devices: several of them, each for a block of
    layers, instead of `device`. dtype: `fp64`, `fp32` or `bf16`. impl: `auto`, `torch` or `triton`, of the kernels.
    max_bytes: largest trace that may be written, in bytes; None is limited by the free disk only.
    verbosity: -1 no progress, 0 progress and notes, 1 and more details.
    """

    device: str = "auto"
    devices: tuple[str, ...] = ()
    dtype: str = "fp32"
    impl: str = "auto"
    seed: int = 0
    max_bytes: int | None = None
    force: bool = False
    verbosity: int = 0


@dataclass(frozen=True)
class DemoOptions(Common):
    """The main job on the embedded model and texts; `out` is the folder of its traces and its report."""

    out: Path = Path("demo")


@dataclass(frozen=True)
class RunOptions(Common):
    """One prompt under some arms: `record` (with raw states) and `sweep` (many cuts and replay lengths).

    model: a preset or a folder. prompt: where its tokens come from. out: the trace. arms: names as typed; `broken:*`
    and `oracle:*` are still globs. hooks: globs of the points whose raw states are kept. suffix: tokens run from the
    cut on, None for all. semantics: names. chunks: rows per chunk of the prefill, or the chunks' ends, None for one
    chunk. block: block or page size of the cache, None for each semantics' own. rows: keep divergence row by row.
    audit: top-k and experts frozen from `full`. rounding: `on` as the config says, or `off`. topk: `sparse`, or
    `dense` to attend every visible entry. experts: `free`, or `frozen` to take full's. reproducible: bitwise equal
    however rows are packed. tokens: how many of the prompt's tokens are used, None for all. forced: how many of the
    last tokens are decoded instead of prefilled. layers_only: run the first so many layers, None for all. stream: hold
    one layer's weights at a time. Of a Hugging Face model, chat: the prompt's text goes into its chat template, and
    quantize: `8bit` or `4bit` weights, None for its own.
    compression: of raw states, `none` or `gzip`. store_dtype: cast
    raw states to `bf16` or `fp16`, None to keep them as they are. resume: go on with the `.partial`.
    """

    model: str = "mini"
    prompt: Prompt = field(default_factory=lambda: Prompt("sample", "prose"))
    out: Path = Path("trace.h5")
    arms: tuple[str, ...] = ("full",)
    cuts: str | None = None
    replay: str = "W"
    suffix: int | None = None
    hooks: tuple[str, ...] = ()
    semantics: tuple[str, ...] = ("paper",)
    chunks: int | tuple[int, ...] | None = None
    budget: int | None = None
    block: int | None = None
    rows: bool = False
    audit: bool = False
    rounding: str = "on"
    topk: str = "sparse"
    experts: str = "free"
    reproducible: bool = False
    tokens: int | None = None
    forced: int = 0
    layers_only: int | None = None
    stream: bool = False
    compression: str = "none"
    chat: bool = False
    quantize: str | None = None
    store_dtype: str | None = None
    resume: bool = False


@dataclass(frozen=True)
class ImportOptions:
    """A dump of an engine to be made a trace: `import`.

    source: folder or file. format: `sglang-dump`, `vllm-hidden` or `folder`. map: a shipped name map or a file.
    engine, engine_version, engine_commit: who computed it. model: a preset or a folder, or empty with `against`, whose
    config and prompt are taken. prompt: None if the dump holds its tokens. arm, cut, replay, semantics: what was run.
    steps: first and one behind the last of the dump's steps (None: to the end), or None for all.
    """

    source: Path
    format: str
    map: str
    engine: str
    engine_version: str
    engine_commit: str
    out: Path
    model: str = ""
    prompt: Prompt | None = None
    against: Path | None = None
    arm: str = "full"
    cut: int | None = None
    replay: int | None = None
    semantics: str = "paper"
    steps: tuple[int, int | None] | None = None
    force: bool = False


@dataclass(frozen=True)
class Result:
    """What a command prints: `text`, with --quiet without the lines that begin with `note: `, or `json` with --json.
    exit_code: 0 good, 1 over a threshold."""

    text: str
    json: Mapping[str, Any]
    exit_code: int = 0
