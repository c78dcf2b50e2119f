"""Which files a page may open, and what it remembers of them."""

import copy
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from replayscope.inspector.errors import UsageError
from replayscope.traces import TraceError
from replayscope.ui import library as module
from replayscope.ui import maps, view
from replayscope.ui.library import Library
from replayscope.ui.view import Choice
from tests.synthetic import synthetic_trace


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("library") / "a.h5"
    synthetic_trace(path, n_tokens=48, window=8, layers=3, cuts=(4, 24, 40))
    return path


@pytest.fixture
def root(tmp_path, made) -> Path:
    root = tmp_path / "data" / ".hidden"
    (root / "sub").mkdir(parents=True)
    for path in (root / "a.h5", root / "sub" / "b.h5", tmp_path / "secret.h5"):
        shutil.copy(made, path)
    (root / "notes.txt").write_text("no trace")
    return root


def test_traces_are_named_below_the_root(root):
    os.mkfifo(root / "pipe.h5")
    assert sorted(Library(root).names()) == ["a.h5", "sub/b.h5"]


@pytest.mark.parametrize(
    "name",
    [
        "../../secret.h5",
        "sub/../../../secret.h5",
        "/etc/passwd",
        "notes.txt",
        "a.h5\\0",
        "",
        "sub",
        "link.h5",
        "inside/secret.h5",
    ],
)
def test_nothing_else_can_be_opened(root, name):
    (root / "link.h5").symlink_to(root.parent.parent / "secret.h5")
    (root / "inside").symlink_to(root.parent.parent)
    library = Library(root)
    assert "link.h5" not in library.names()
    with pytest.raises(UsageError) as error:
        library.open(name)
    assert str(root.parent.parent) not in str(error.value)
    with pytest.raises(UsageError):
        library.open(str(root.parent.parent / "secret.h5"))


def test_a_root_that_is_a_link_is_resolved(root, tmp_path):
    (tmp_path / "alias").symlink_to(root)
    assert sorted(Library(tmp_path / "alias").names()) == ["a.h5", "sub/b.h5"]


def test_an_error_names_the_trace_and_no_folder(root):
    (root / "broken.h5").write_bytes(b"not a trace")
    library = Library(root)
    with pytest.raises(TraceError) as error:
        library.open("broken.h5")
    said = library.public(error.value, "broken.h5")
    assert "broken.h5" in said and str(root) not in said and os.sep + "tmp" not in said


def test_what_was_drawn_is_kept_until_the_file_changes(root, monkeypatch):
    library, drawn = Library(root), []
    make = lambda trace: drawn.append(trace.path) or "x" * 10  # noqa: E731
    for _ in range(3):
        library.cached("a.h5", "map", make)
    assert len(drawn) == 1
    synthetic_trace(root / "a.h5", n_tokens=48, window=8, layers=3, cuts=(4, 24))
    library.cached("a.h5", "map", make)
    assert len(drawn) == 2
    monkeypatch.setattr(module, "_CACHED", 25)
    for i in range(20):
        library.cached("a.h5", i, make)
    assert len(library._made) <= 3 and library._size == sum(map(len, library._made.values()))


def test_a_trace_that_goes_away_is_said(root):
    library = Library(root)
    library.open("a.h5")
    (root / "a.h5").unlink()
    with pytest.raises(UsageError, match="choose"):
        library.open("a.h5")


def test_many_threads_get_the_same_map(root):
    library, found = Library(root), []
    choice = view.menus(library.open("a.h5"), Choice("a.h5")).choice
    threads = [threading.Thread(target=lambda: found.append(maps.cut_map(library, choice))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len(set(found)) == 1


def test_menus_mend_what_the_trace_does_not_have(root):
    trace = Library(root).open("a.h5")
    shown = view.menus(trace, Choice("a.h5"))
    assert (shown.choice.arm, shown.choice.point, shown.choice.metric) == ("encoder", "window_kv", "rel_l2")
    assert shown.cuts == [4, 24, 40] and shown.choice.cut in (24, 40), "it opens behind the first window"
    odd = view.menus(
        trace, Choice("a.h5", "no such arm", "truth", "logits", "nowhere", "rel_l2", 39, 99, 999, 0, "", "?")
    )
    assert odd.choice.arm == "encoder" and odd.choice.reference == "full" and odd.choice.region == "window"
    assert odd.choice.point == "logits" and odd.choice.metric in [m for _, m in odd.metrics]
    assert odd.choice.cut == 40, "the nearest cut"
    assert odd.choice.layer == 0 and odd.choice.position == 47, "logits have one layer, the text 48 tokens"
    assert odd.choice.other_arm in [arm for arm, _ in odd.other_arms] and odd.choice.other_arm != odd.choice.arm
    copy.deepcopy(shown)


@pytest.mark.parametrize(
    "choice",
    [
        Choice("a b/ü&.h5", "encoder, replay 2", "oracle", "hidden", "suffix", "cosine", 0, 3, 17, 1, "b.h5", "hit"),
        Choice("a.h5"),
    ],
)
def test_an_address_holds_the_whole_view(choice):
    assert view.from_address(view.address("cut", choice)) == ("cut", choice)


@pytest.mark.parametrize("query", ["", "?", "?cut=-3&layer=x&position=1e9", "?cut=99999999999999999999", "?x=1&&&=%ff"])
def test_an_address_that_says_nothing_useful_leaves_the_choice_open(query):
    assert view.from_address(query) == ("", Choice(""))


def test_an_address_is_cut_short():
    assert len(view.from_address("?trace=" + "a" * 5000)[1].trace) == 300


def test_what_many_ask_for_at_once_is_made_once(root):
    library, made, gate = Library(root), [], threading.Barrier(4)

    def ask():
        gate.wait()
        library.cached("a.h5", "slow", lambda trace: (time.sleep(0.1), made.append(trace.path), "x")[2])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    with pytest.raises(ZeroDivisionError):
        library.cached("a.h5", "fails", lambda trace: 1 / 0)
    assert library.cached("a.h5", "fails", lambda trace: "now") == "now", "a failure is not kept"
