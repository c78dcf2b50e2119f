"""How threads wait is set before torch is there, and by nobody who was told otherwise."""

import os
import subprocess
import sys

import pytest

from replayscope.inspector.waiting import TURNS, asleep_soon

SHOWN = (
    "import os, sys; import {module}; "
    "print('torch' in sys.modules, os.environ.get('OMP_WAIT_POLICY'), os.environ.get('GOMP_SPINCOUNT'))"
)


def shown(module: str, **told: str) -> list[str]:
    """What a new process has after it has imported a module: whether torch is there, and how threads wait."""
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} | told
    done = subprocess.run(
        [sys.executable, "-c", SHOWN.format(module=module)], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_command_line_sets_it_before_torch_is_there():
    assert shown("replayscope.inspector.cli") == ["False", "PASSIVE", TURNS]
    assert shown("sys") == ["False", "None", "None"], "the twin: nothing else does"


@pytest.mark.parametrize("told", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}], ids=str)
def test_who_says_it_himself_is_left_alone(told):
    got = shown("replayscope.inspector.cli", **told)
    assert got[1:] == [told.get("OMP_WAIT_POLICY", "None"), told.get("GOMP_SPINCOUNT", "None")]
    assert asleep_soon(told) == {}
