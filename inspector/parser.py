"""What can be typed: the commands of `replayscope` and their options. No torch, no numpy."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from replayscope.inspector import commands, judge_options, specs
from replayscope.inspector.errors import UsageError
from replayscope.inspector.options import FORMATS, Result
from replayscope.inspector.prompts import FORMS, parse_prompt
from replayscope.inspector.streams import put

MODEL_HELP = "a preset (replayscope list models), a folder with a checkpoint, or a Hugging Face folder or id"


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print its usage and exit."""

    def __init__(self, **about: Any) -> None:
        super().__init__(**about)
        self.register("action", None, _Last)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def print_help(self, file: Any = None) -> None:
        """By itself argparse says nothing of a help text that cannot be written."""
        put(self.format_help().rstrip("\n"))


class _Last(argparse.Action):
    """Keeps the last value, as argparse does by itself, and in ``again`` which options were given more than once."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        seen = getattr(namespace, "seen", ())
        if option and self.dest in seen and option not in (again := getattr(namespace, "again", ())):
            namespace.again = (*again, option)
        namespace.seen = (*seen, self.dest)
        setattr(namespace, self.dest, values)


class _Version(argparse.Action):
    """Reads the package's metadata only when it is asked for: that takes longer than all of --help."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        put(f"replayscope {version('replayscope')}")
        parser.exit()


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and the parser of each command by name."""
    parser = Parser(
        prog="replayscope", description="What bounded replay of the sliding-window KV changes.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    added = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)

    def command(name: str, run: Callable[[argparse.Namespace], Result], about: str) -> Parser:
        sub = added.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".", allow_abbrev=False)
        sub.set_defaults(call=run, again=())
        return sub

    demo = command("demo", commands.demo, "the main job on the embedded model and texts")
    demo.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("demo"),
        metavar="DIR",
        help="folder of its traces and report (default demo)",
    )
    _model_options(demo)

    record = command("record", commands.record, "run some arms over one prompt and keep states and divergence")
    _run_options(record, arms="full,encoder,oracle:encoder")
    sweep = command("sweep", commands.sweep, "run arms at many cuts and replay lengths and keep their divergence")
    _run_options(sweep, arms="full,repeat,rechunk,hit,encoder,oracle:encoder")

    compare = command("compare", commands.compare, "set two traces against each other")
    compare.add_argument("first", type=Path, metavar="A.h5")
    compare.add_argument("second", type=Path, metavar="B.h5")
    compare.add_argument(
        "--tol",
        action="append",
        default=[],
        metavar="POINTS=METRIC<=NUMBER",
        help="exit with 1 where a hook point exceeds it, as 'layers.*.window_kv=rel_l2<=1e-3'; may be given again",
    )
    compare.add_argument("--cross-arm", action="store_true", help="compare different arms with each other")
    compare.add_argument(
        "--first", dest="stop_at_first", action="store_true", help="stop at the first cell over its threshold"
    )
    compare.add_argument(
        "--floor", type=Path, metavar="T.h5", help="a trace with noise runs, or A recorded again: within it is noise"
    )

    import_ = command("import", commands.import_, "make a trace of states that an engine wrote")
    _import_options(import_)

    show = command("show", commands.show, "what a trace holds: arms, hook points, sizes, provenance")
    show.add_argument("trace", type=Path, metavar="T.h5")
    show.add_argument("--verify", action="store_true", help="read every number and check its integrity")

    plot = command("plot", commands.plot, "draw figures of a trace into a file")
    plot.add_argument("trace", type=Path, metavar="T.h5")
    plot.add_argument("other", type=Path, nargs="?", metavar="T2.h5", help="a second trace, for --figure compare")
    plot.add_argument("--figure", default="all", metavar="NAME", help="replayscope list figures, or all (the default)")
    plot.add_argument("--metric", metavar="NAME", help="replayscope list metrics (default: the figure's own)")
    plot.add_argument("--point", metavar="NAME", help="hook point without its layer, as window_kv or hidden")
    plot.add_argument("--region", metavar="NAME", help="rows of a cut: all, window, suffix, last or exact")
    plot.add_argument("--arm", metavar="NAME", help="the arm to show")
    plot.add_argument("--run", metavar="N", help="the run to show, by its number in the trace")
    plot.add_argument("--reference", metavar="NAME", help="what runs are compared with: full (the default) or oracle")
    plot.add_argument("--other-arm", metavar="NAME", help="the arm to set beside it, for --figure compare")
    plot.add_argument("--layer", metavar="N", help="of --figure tensor (default: every layer at one position)")
    plot.add_argument("--head", metavar="N", help="of --figure tensor, where the hook point has heads or streams")
    plot.add_argument("--position", metavar="N", help="of --figure tensor (default: the last before the cut)")
    plot.add_argument(
        "--threshold", type=specs.parse_threshold, metavar="X", help="line of --figure replay-length and healing"
    )
    plot.add_argument("--dark", action="store_true", help="png, svg and pdf on a dark ground")
    _out_option(plot, "OUT", "file (.html .png .svg .pdf .csv .json), or with --figure all a folder")

    report = command("report", commands.report, "write the whole report of traces as one HTML file")
    report.add_argument("traces", type=Path, nargs="+", metavar="T.h5")
    _out_option(report, "OUT.html", "file to write")

    ui = command("ui", commands.ui, "open traces in the browser")
    ui.add_argument("trace", type=Path, nargs="?", metavar="T.h5")
    ui.add_argument(
        "--root", type=Path, metavar="DIR", help="folder whose traces may be opened (default: the trace's, or this one)"
    )
    ui.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    ui.add_argument("--port", metavar="N", help="port to listen on (default: the first free one from 7860)")
    ui.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME",
        help="also answer requests for this host name, such as a proxy's; may be repeated",
    )  # fmt: skip
    ui.add_argument("--auth", metavar="USER:PASSWORD|@FILE", help="ask for a name and a password (default: neither)")

    judge = command("judge", judge_options.judge, "plan, run, freeze or judge an acceptance matrix")
    judge_options.add(judge)

    ledger = command("ledger", commands.ledger, "what a config costs to cache, to replay and to store")
    _ledger_options(ledger)

    list_ = command("list", commands.list_, "what can be named: " + ", ".join(commands.TOPICS))
    list_.add_argument("topic", metavar="TOPIC", help=" | ".join(commands.TOPICS))

    for sub in added.choices.values():
        output = sub.add_argument_group("output")
        output.add_argument("--json", action="store_true", help="one JSON document on stdout instead of a table")
        output.add_argument(
            "-q", "--quiet", dest="verbosity", action="store_const", const=-1, default=0, help="no progress, no notes"
        )
        output.add_argument(
            "-v", "--verbose", dest="verbosity", action="store_const", const=1, help="more details on stderr"
        )
        output.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser, dict(added.choices)


def _import_options(sub: Parser) -> None:
    sub.add_argument("source", type=Path, metavar="SRC", help="folder or file that the engine wrote")
    sub.add_argument("--format", required=True, metavar="NAME", help=" | ".join(FORMATS))
    sub.add_argument("--map", required=True, metavar="MAP", help="a JSON name map: v41, huggingface or a file")
    sub.add_argument("--engine", required=True, metavar="NAME", help="the engine that computed the states")
    sub.add_argument("--engine-version", required=True, metavar="V", help="its version")
    sub.add_argument("--engine-commit", required=True, metavar="C", help="its commit")
    sub.add_argument("-m", "--model", metavar="MODEL", help=f"whose config: {MODEL_HELP}")
    sub.add_argument("-p", "--prompt", type=parse_prompt, help=f"{FORMS}; may be left out if the dump holds its tokens")
    sub.add_argument("--against", type=Path, metavar="OURS.h5", help="take config and prompt of this trace and compare")
    sub.add_argument("--arm", default="full", metavar="ARM", help="what was run (default full)")
    sub.add_argument("--cut", metavar="H", help="prefix tokens that were cached, of arms with a cut")
    sub.add_argument("--replay", metavar="R", help="rows that were replayed (default W)")
    sub.add_argument("--semantics", default="paper", metavar="NAME", help="whose rules were followed (default paper)")
    sub.add_argument("--steps", metavar="A[:B]", help="steps of the dump, B not included (default all)")
    _out_option(sub, "T.h5", "trace to write")


def _run_options(sub: Parser, arms: str) -> None:
    """Options of record and sweep; `arms` is the default."""
    sub.add_argument("-m", "--model", default="mini", help=f"{MODEL_HELP} (default mini)")
    sub.add_argument("-p", "--prompt", type=parse_prompt, default="prose", help=f"{FORMS} (default prose)")
    sub.add_argument("--arms", default=arms, metavar="ARM,…", help=f"arms (replayscope list arms; default {arms})")
    sub.add_argument(
        "--cuts",
        type=specs.check_cuts,
        default="grid",
        metavar="SPEC",
        help=f"{specs.CUT_FORMS}; W is the window (default grid)",
    )
    sub.add_argument(
        "--replay", type=specs.check_replay, default="W", metavar="SPEC", help=f"{specs.REPLAY_FORMS} (default W)"
    )
    sub.add_argument(
        "--suffix",
        type=specs.parse_suffix,
        default="all",
        metavar="S",
        help="tokens to run from the cut on, or all (the default)",
    )
    sub.add_argument(
        "--semantics", default="paper", metavar="NAME,…", help="whose rules the arms follow (default paper)"
    )
    sub.add_argument(
        "--chunks",
        type=_chunks,
        metavar="SIZE|END,…",
        help="rows per chunk of the prefill, or the positions where its chunks end (default: one chunk)",
    )
    sub.add_argument(
        "--budget",
        type=lambda text: specs.parse_count(text, "--budget", least=1),
        metavar="ROWS",
        help="rows in memory at once; cuts beyond run in further parts, full again with each (default: 16 prompts)",
    )
    sub.add_argument(
        "--block",
        type=lambda text: specs.parse_count(text, "--block", least=1),
        metavar="N",
        help="block or page size of the prefix cache, of which cuts are multiples (default: the semantics' own)",
    )
    sub.add_argument(
        "--hooks",
        action="append",
        default=[],
        metavar="GLOB,…",
        help="hook points whose raw states are kept (replayscope list hooks)",
    )
    sub.add_argument("--rows", action="store_true", help="keep divergence row by row as well")
    sub.add_argument(
        "--audit",
        action="store_true",
        help="fp64 or fp32 with top-k and experts frozen from full: where a bug is a bug",
    )
    sub.add_argument(
        "--rounding", choices=("on", "off"), default="on", help="rounding of cached states, if the model has it"
    )
    sub.add_argument("--topk", choices=("sparse", "dense"), default="sparse", help="dense attends every visible entry")
    sub.add_argument("--experts", choices=("free", "frozen"), default="free", help="frozen takes those of full")
    sub.add_argument("--reproducible", action="store_true", help="bitwise equal however the rows are packed; slower")
    sub.add_argument(
        "--tokens",
        type=lambda text: specs.parse_count(text, "--tokens", least=1),
        metavar="N",
        help="use only the first N tokens of the prompt",
    )
    sub.add_argument(
        "--forced",
        type=lambda text: specs.parse_count(text, "--forced"),
        default=0,
        metavar="K",
        help="the last K tokens count as decoded: decoder replay ends its prompt before them",
    )
    sub.add_argument(
        "--layers-only",
        type=lambda text: specs.parse_count(text, "--layers-only", least=1),
        metavar="K",
        help="run only the first K layers",
    )
    sub.add_argument(
        "--stream",
        action="store_true",
        help="hold one layer's weights at a time (by itself where they do not fit into the free memory)",
    )
    sub.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template (Hugging Face)")
    sub.add_argument(
        "--quantize", choices=("8bit", "4bit"), help="hold the weights in 8 or 4 bits, with bitsandbytes (Hugging Face)"
    )
    sub.add_argument(
        "--compression",
        choices=("none", "gzip"),
        default="none",
        help="gzip makes raw states smaller, for mailing, and writing slower (default none)",
    )
    sub.add_argument(
        "--store-dtype",
        choices=("bf16", "fp16"),
        help="store floating raw states in a smaller dtype; what overflows or becomes 0 is counted, said and kept",
    )
    sub.add_argument(
        "--resume",
        action="store_true",
        help="go on behind the last layer that the same command had kept beside T.h5.partial when it was stopped",
    )
    _out_option(sub, "T.h5", "trace to write", force=False)
    _model_options(sub)


def _ledger_options(sub: Parser) -> None:
    """Options of ledger: a config, a load, and what no config says."""

    def count(name: str, default: int, about: str) -> None:
        sub.add_argument(
            name, type=lambda text: specs.parse_count(text, name, least=1), metavar="N", help=f"{about} ({default})"
        )

    sub.add_argument(
        "-m",
        "--model",
        default="v41-flash",
        help="v41-flash (the default), v4-flash, another preset, a folder with a config.json, or a Hugging Face id; "
        "no weights are needed",
    )
    count("--tokens", 1_000_000, "tokens of a context")
    count("--contexts", 8, "contexts kept at once")
    sub.add_argument("--replay", type=specs.check_replay, metavar="SPEC", help=f"{specs.REPLAY_FORMS} (default W)")
    count("--persistent", 8, "how many times the persistent KV of V4-Flash is larger")
    count("--global-hours", 72, "lifetime of global KV in hours")
    count("--window-minutes", 5, "lifetime of window KV in minutes")
    count("--host-share", 10, "percent of host memory for window KV")
    sub.add_argument("--host-memory", type=specs.parse_bytes, metavar="SIZE", help="host memory (default 1TiB)")


def _chunks(text: str) -> int | tuple[int, ...]:
    """One number is a size, several are ends in ascending order."""
    numbers = tuple(specs.parse_count(part, "--chunks", least=1) for part in text.split(","))
    if list(numbers) != sorted(set(numbers)):
        raise UsageError(f"--chunks {text} must name ascending positions, or one size")
    return numbers[0] if len(numbers) == 1 else numbers


def _model_options(sub: Parser) -> None:
    """Options of every command that runs a model."""
    group = sub.add_argument_group("common")
    group.add_argument("--device", type=specs.parse_device, help="auto (the default), cpu, cuda or cuda:N")
    group.add_argument(
        "--devices",
        type=specs.parse_devices,
        default=(),
        metavar="DEVICE,…",
        help="several devices, each for a block of layers that take about the same bytes, as cuda:0,cuda:1",
    )
    group.add_argument("--dtype", type=specs.parse_dtype, default="fp32", help="fp64, fp32 (the default) or bf16")
    group.add_argument(
        "--impl",
        choices=("auto", "torch", "triton"),
        default="auto",
        help="form of the kernels: auto (the default) takes triton on CUDA, except for fp64; the trace says which ran",
    )
    group.add_argument(
        "--seed",
        type=lambda text: specs.parse_count(text, "--seed"),
        default=0,
        metavar="N",
        help="of everything drawn at random (default 0)",
    )
    group.add_argument(
        "--max-bytes", type=specs.parse_bytes, metavar="SIZE", help="refuse to write a larger trace, as 512M or 4GB"
    )
    group.add_argument("--force", action="store_true", help="replace output that exists")


def _out_option(sub: Parser, metavar: str, about: str, force: bool = True) -> None:
    sub.add_argument("-o", "--out", type=Path, required=True, metavar=metavar, help=about)
    if force:
        sub.add_argument("--force", action="store_true", help="replace the file if it exists")
