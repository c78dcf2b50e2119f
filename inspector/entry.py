"""Where the program `replayscope` begins: it imports next to nothing, so that Ctrl-C is heard from the first moment."""

import sys


def main() -> int:
    """The command line; returns its exit code. Interrupted while it is still being loaded, it says so in one line."""
    try:
        from replayscope.inspector import cli

        return cli.main()
    except KeyboardInterrupt:
        if "--debug" in sys.argv:
            raise
        print("replayscope: interrupted", file=sys.stderr)
        return 130
