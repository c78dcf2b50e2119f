"""Where the program `replayscope` begins: it imports next to nothing, so that Ctrl-C is heard from the first moment."""

import sys


def main() -> int:
    """The command line; returns its exit code. Interrupted while it is still being loaded, it says so in one line."""
    try:
        from replayscope.inspector import streams

        streams.open_closed()
        from replayscope.inspector import cli

        code = cli.main()
        _leave_at_once(code)
    except KeyboardInterrupt:
        _leave_at_once(130)
        if "--debug" in sys.argv:
            raise
        print("replayscope: interrupted", file=sys.stderr)
        return 130
    return code


def _leave_at_once(code: int) -> None:
    """Have a further Ctrl-C end the program with the code that is told anyway. All is said and closed by now, and what
    libraries still do while Python shuts down would answer it with a traceback."""
    while True:
        try:
            import os
            import signal

            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, lambda *_, leave=os._exit: leave(code))
            return
        except KeyboardInterrupt:
            continue
