"""Rules of all tests: a skip is a failure in CI, GPU tests are left out where no GPU is, one Hypothesis profile."""

import gc
import os
import shutil
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# As the command line does, before anything imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A shell has what it starts in the background ignore Ctrl-C, and programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

CI = os.environ.get("CI", "").lower() not in ("", "0", "false")
ROOT = Path(__file__).resolve().parents[1]
# For tests that build the page: Gradio leaves an event loop open for every Blocks that is built outside of one.
LOOPS = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("collected"),
]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# No deadline: the machine is shared, and a slow example is no error. CI draws the same examples every time.
settings.register_profile("replayscope", deadline=None, max_examples=100, derandomize=CI)
settings.load_profile("replayscope")


def _fail_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"a skipped test fails in CI: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_skip(report)
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked `gpu` out where torch sees no CUDA device: no CPU machine could ever pass them."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def collected() -> Generator[None, None, None]:
    """Lets the loops of `LOOPS` go while they are forgiven, and not at the end of all tests."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium for the browser tests; skips with the package to install where there is none."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    pytest.skip(f"no browser found ({', '.join(BROWSERS)}); install the package chromium")


@pytest.fixture(scope="module")
def browser(chromium):
    """A real browser; playwright is imported only where a test asks for it."""
    from tests.browsing import started

    yield from started(chromium)


@pytest.fixture
def watched(browser):
    """A page of it that fails the test if it complained of anything."""
    from tests.browsing import Watched

    made = Watched(browser)
    yield made
    made.close()
