"""The command `replayscope`: runs one command, tells its result and its errors.

Results go to stdout, progress and logs to stderr. Exit code 0 is good, 1 over a threshold, 2 an error of usage, input
or output, 130 interrupted. An error is one line; --debug shows where it came from. Torch is imported by no option and
no help text, only by the commands that run a model.
"""

import argparse
import io
import json
import logging
import math
import os
import sys
import traceback
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replayscope.inspector.errors import ReplayScopeError, UsageError, system_error
from replayscope.inspector.names import nearest, unknown
from replayscope.inspector.options import Result
from replayscope.inspector.parser import build_parser
from replayscope.inspector.streams import put, say

log = logging.getLogger("replayscope")
# Torch's threads wait by spinning; beside another busy process that made a sweep ten times slower (measured).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` is sys.argv without the program's name."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        options = parse(words)
        _log_to_stderr(options.verbosity, debug)
        for option in options.again:
            log.info("%s is given more than once; the last one counts", option)
        # For a command that has its result before it ends.
        options.tell = lambda result: _emit(result, options.json, options.verbosity < 0)
        result = options.call(options)
        options.tell(result)
        return result.exit_code
    except KeyboardInterrupt as error:
        message, code, cause = "interrupted", 130, error
    except ReplayScopeError as error:
        message, code, cause = str(error), error.exit_code, error
    except Exception as error:
        message, code, cause = _explain(error), 2, error
    if debug:
        # Beside the line, not instead of it: the exit code says the same with and without.
        say("".join(traceback.format_exception(cause)).rstrip("\n"))
    say(f"replayscope: {_printable(' '.join(message.split()))}")
    return code


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The typed words as a namespace whose `call` is the command. Raises UsageError; exits for --help and --version."""
    parser, by_name = build_parser()
    if not words:
        raise UsageError(f"give a command: {', '.join(by_name)}; see replayscope --help")
    if words[0] not in by_name and not words[0].startswith("-"):
        raise unknown("command", words[0], by_name)
    options, left = parser.parse_known_args(words)
    if left:
        if left[0].startswith("-") and options.command:
            typed = left[0].split("=")[0]
            near = nearest(
                typed, [name for action in by_name[options.command]._actions for name in action.option_strings]
            )
            guess = f"did you mean {near}? " if near else ""
            raise UsageError(f"unknown option {typed}; {guess}see replayscope {options.command} --help")
        raise UsageError(f"unexpected argument {left[0]!r}; see replayscope {options.command or ''} --help")
    return options


def _log_to_stderr(verbosity: int, debug: bool) -> None:
    level = {-1: logging.WARNING, 0: logging.INFO, 1: logging.DEBUG}[verbosity]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(level)
    # What draws images complains of a browser that has done its work.
    for package in ("kaleido", "choreographer"):
        logging.getLogger(package).handlers[:] = [handler if debug else logging.NullHandler()]


def _emit(result: Result, as_json: bool, quiet: bool = False) -> None:
    """Print a result. A reader that closes the pipe early (`| head`) is no error. quiet: leave out the text's notes."""
    lines = [line for line in result.text.split("\n") if not (quiet and line.startswith("note: "))]
    text = json.dumps(_strict(result.json), indent=2) if as_json else _printable("\n".join(lines).rstrip("\n"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a token's text may hold what the terminal cannot show
    put(text)


def _printable(text: str) -> str:
    """Control characters written out: a name in a stranger's trace must not command the terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else ascii(c)[1:-1] for c in text)


def _strict(value: Any) -> Any:
    """`value` as strict JSON holds it: NaN is null, infinities are the strings `inf` and `-inf`, arrays are lists."""
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else f"{value}"
    return str(value) if isinstance(value, Path) else value


def _explain(error: Exception) -> str:
    """One line for an error that is not the project's own."""
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename is not None else ""
        return f"{name}{system_error(error)}"
    # Torch's own errors are told apart by name and text, so that torch need not be imported here.
    memory = (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )
    if memory:
        return "out of memory; give fewer cuts, a smaller --suffix or fewer --hooks"
    return f"internal error: {type(error).__name__}: {error}; run again with --debug to see where"
