"""The command `judge`: what can be typed, checked before anything is loaded. No torch, no numpy until it is called."""

import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from replayscope.inspector import checks, specs
from replayscope.inspector.engines import ENGINES
from replayscope.inspector.errors import UsageError
from replayscope.inspector.listing import models
from replayscope.inspector.names import choose
from replayscope.inspector.options import Result

if TYPE_CHECKING:
    from replayscope.inspector.judge_contract import Contract

ACTIONS = {
    "plan": "show the cells of a contract, and what they would cost",
    "run": "run them, or what of them has not run yet, and judge",
    "freeze": "stamp a contract with its hash and the day, before anything runs",
    "verdict": "judge results again, under their own contract or another one",
}
_ENDPOINT = ("engine_model", "engine_semantics", "max_requests", "max_seconds", "salt", "cache_block")
# Options that an action takes, besides those of every command.
_TAKES = {
    "plan": ("model", "cells", "device", "dtype"),
    "run": ("model", "cells", "device", "dtype", "out", "force", "plant", "endpoint", *_ENDPOINT),
    "freeze": ("out", "force"),
    "verdict": ("contract", "unfrozen", "worst"),
}


def add(sub: ArgumentParser) -> None:
    """Options of all actions: which action takes which is checked when it is called."""

    def count(name: str, about: str) -> None:
        sub.add_argument(name, type=lambda t: specs.parse_count(t, name, least=1), metavar="N", help=about)

    sub.add_argument("action", metavar="ACTION", help=" | ".join(ACTIONS))
    sub.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="of plan, run and freeze a contract (TOML; default: the shipped one, default); of verdict the results",
    )
    sub.add_argument("-m", "--model", metavar="MODEL", help="a preset (default mini), or a Hugging Face folder or id")
    sub.add_argument("-o", "--out", type=Path, metavar="OUT", help="run: results (.jsonl); freeze: the frozen contract")
    sub.add_argument("--cells", metavar="GLOB", help="only the cells with such names (judge plan --json lists them)")
    sub.add_argument(
        "--plant",
        action="append",
        metavar="GLOB=broken:KIND",
        help="run a broken arm in these cells under the name of the right one, to see whether it is found",
    )
    sub.add_argument("--contract", metavar="FILE", help="verdict: judge under this contract (default: the runs' own)")
    sub.add_argument(
        "--unfrozen", action="store_true", default=None, help="verdict: allow a contract written after the runs began"
    )
    count("--worst", "verdict: how many of the worst cells are shown (default 10)")
    engine = sub.add_argument_group("a running engine (judge run)")
    engine.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible server, as http://127.0.0.1:8000/v1")
    engine.add_argument("--engine-model", metavar="NAME", help="the model's name there")
    engine.add_argument(
        "--engine-semantics", metavar="NAME", help="whose replay the engine has, for the features it serves"
    )
    engine.add_argument(
        "--salt", action="store_true", default=None, help="send a cache_salt, so that a cold request finds no cache"
    )
    count_engine = {
        "--max-requests": "requests at most (default 1000)",
        "--max-seconds": "seconds at most, all requests together (default 1800)",
        "--cache-block": "tokens by which a hit may be shorter than what was cached (default 1)",
    }
    for name, about in count_engine.items():
        engine.add_argument(name, type=lambda t, n=name: specs.parse_count(t, n, least=1), metavar="N", help=about)
    group = sub.add_argument_group("common")
    group.add_argument("--device", type=specs.parse_device, help="auto (the default), cpu, cuda or cuda:N")
    group.add_argument("--dtype", type=specs.parse_dtype, help="fp64, fp32 (the default) or bf16")
    group.add_argument("--force", action="store_true", default=None, help="replace output that exists, start over")


def judge(options: Namespace) -> Result:
    """Plan, run, freeze or judge an acceptance matrix."""
    action = choose("action", options.action, ACTIONS)
    _fits(options, action)
    if action == "verdict":
        return _verdict(options)
    from replayscope.inspector import judge_contract, judge_limits

    source = options.file or judge_contract.DEFAULT
    contract = judge_contract.load(source, again=action == "freeze")
    if action == "freeze":
        if options.out is None and options.file in (None, judge_contract.DEFAULT):
            raise UsageError("the shipped contract is not written to; give a copy a name with -o")
        target = options.out or Path(source)
        _writable(target, options.force or options.out is None)
        checks.apart(target, judge_contract.task_paths(contract, source))
        text = judge_contract.freeze(contract)
        frozen = judge_contract.parse(text, target.name, find=judge_contract.beside(target))
        target.write_text(text, encoding="utf-8")
        return Result(
            f"{frozen.stamp}\n{target}", {"contract": frozen.stamp, "sha256": frozen.sha256, "file": str(target)}
        )
    served = judge_contract.support(contract)
    if served.refused:
        return Result(
            "\n".join(["verdict: refuse, before anything ran", *(f"because {why}" for why in served.refused)]),
            {"verdict": "refuse", "reasons": list(served.refused)},
            1,
        )
    judge_limits.check(contract, Path(source).name, options.engine_semantics if options.endpoint is not None else None)
    if options.endpoint is not None:
        return _endpoint(options, contract, source)
    from replayscope.inspector import judge as use_case

    asked = use_case.JudgeRun(
        contract,
        source,
        model=_model(options.model or "mini"),
        cells=options.cells or "*",
        plants=_plants(options.plant or []),
        device=options.device or "auto",
        dtype=options.dtype or "fp32",
        force=bool(options.force),
    )
    if action == "plan":
        return use_case.plan(asked)
    return use_case.run(replace(asked, out=_results(options.out, contract, source)))


def _verdict(options: Namespace) -> Result:
    if options.file is None:
        raise UsageError("judge verdict needs the results file of judge run")
    from replayscope.inspector import judge_contract, judge_results, judge_text, judge_verdict

    path = Path(options.file)
    results = judge_results.read(path)
    if options.contract is not None:
        contract = judge_contract.load(options.contract)
    else:
        contract = judge_results.contract_of(results, path.name)
    try:
        judged = judge_verdict.judge(results, contract, bool(options.unfrozen), options.contract)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise UsageError(f"{path.name} holds results whose parts do not fit ({error}); run the matrix again") from None
    return judge_text.result(judged, path, options.worst or 10)


def _endpoint(options: Namespace, contract: "Contract", source: str) -> Result:
    from replayscope.inspector import judge_endpoint, judge_results, judge_text, judge_verdict

    for name in ("engine_model", "engine_semantics"):
        if getattr(options, name) is None:
            raise UsageError(f"--endpoint needs --{name.replace('_', '-')}")
    out = _results(options.out, contract, source)
    judge_endpoint.run(
        judge_endpoint.EngineRun(
            contract,
            source,
            options.endpoint,
            options.engine_model,
            choose("semantics", options.engine_semantics, list(ENGINES)),
            out,
            cells=options.cells or "*",
            requests=options.max_requests or 1000,
            seconds=float(options.max_seconds or 1800),
            salt=bool(options.salt),
            block=options.cache_block or 1,
            force=bool(options.force),
        )
    )
    judged = judge_verdict.judge(judge_results.read(out), contract)
    return judge_text.result(judged, out)


def _fits(options: Namespace, action: str) -> None:
    """Refuse an option that the action does not take: it would do nothing."""
    known = {name for names in _TAKES.values() for name in names}
    given = [name for name in sorted(known) if getattr(options, name) is not None]
    for name in given:
        if name not in _TAKES[action]:
            raise UsageError(f"judge {action} has no --{name.replace('_', '-')}; leave it out")
        if name in _ENDPOINT and options.endpoint is None:
            raise UsageError(f"--{name.replace('_', '-')} is for --endpoint; leave it out")
    if options.endpoint is not None and (wrong := {"model", "device", "dtype", "plant"} & set(given)):
        raise UsageError(f"--{min(wrong)} is for a model that runs here, not for --endpoint; leave it out")


def _model(name: str) -> str:
    from replayscope.model.hf_config import is_hf

    known = list(models())
    if is_hf(name):
        return name
    if name not in known and Path(name).is_dir():
        raise UsageError(
            f"-m {name}: no folder with a tokenizer, so no task can be asked of it; judge takes Hugging Face models "
            f"and {', '.join(known)}"
        )
    return choose("model", name, known)


def _plants(texts: list[str]) -> Mapping[str, str]:
    from replayscope.inspector.semantics import BROKEN

    found = {}
    for text in texts:
        glob, _, arm = text.rpartition("=")
        kind = re.sub(r"^floor@[0-9]+$", "floor@L", arm.removeprefix("broken:"))
        if not glob or not arm.startswith("broken:") or kind not in BROKEN or arm == "broken:floor@L":
            raise UsageError(f"--plant {text}: write CELLS=broken:KIND; KIND is {', '.join(BROKEN)} (L: a layer)")
        found[glob] = arm
    return found


def _results(out: Path | None, contract: "Contract", source: str) -> Path:
    """Results may exist, and are then continued; with --force they are replaced, but never what they come from."""
    from replayscope.inspector.judge_contract import task_paths

    if out is None or out.suffix != ".jsonl":
        raise UsageError("judge run needs -o with a name that ends in .jsonl")
    if not out.parent.is_dir():
        raise UsageError(f"no folder {out.parent} to write {out.name} into; make it first")
    if out.is_dir() or (out.exists() and not os.access(out, os.W_OK)):
        raise UsageError(f"{out} cannot be written; give another -o")
    checks.plain(out)
    checks.apart(out, [source, *task_paths(contract, source)])
    return out


def _writable(out: Path, force: bool) -> None:
    if out.suffix != ".toml":
        raise UsageError(f"{out}: a contract's name ends in .toml")
    checks.plain(out)
    if not out.parent.is_dir():
        raise UsageError(f"no folder {out.parent} to write {out.name} into; make it first")
    if out.exists() and not force:
        raise UsageError(f"{out} exists; add --force to replace it, or give another -o")
