"""`python -m replayscope.inspector` is the command `replayscope`."""

import sys

from replayscope.inspector.entry import main

sys.exit(main())
