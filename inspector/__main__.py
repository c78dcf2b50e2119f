"""`python -m replayscope.inspector` is the command `replayscope`."""

import sys

from replayscope.inspector.cli import main

sys.exit(main())
