"""The form's models: what lies under the root can be run from the page, Hugging Face folders among it."""

import shutil

from replayscope.inspector import cli
from replayscope.traces.reader import TraceReader
from replayscope.ui.form import OWN_TEXT, Form, command, model_names
from tests import hf


def test_a_hugging_face_folder_under_the_root_is_offered_and_runs(tmp_path, monkeypatch):
    shutil.copytree(hf.folder("mistral"), tmp_path / "kept" / "tiny")
    (name,) = [name for name in model_names(tmp_path) if "tiny" in name]
    typed = {"model": name, "sample": OWN_TEXT, "text": hf.PROMPT, "tokens": "", "cuts": "20", "replay": "W"}
    chosen = {"suffix": "4", "semantics": ["paper"], "precision": "fp64", "audit": False, "rows": False, "name": "t"}
    one = command(Form(**typed, **chosen), tmp_path)
    # The page's jobs run in the root, so that no server path is needed.
    monkeypatch.chdir(tmp_path)
    assert cli.main(list(one.words)) == 0
    trace = TraceReader(tmp_path / "t.h5")
    assert trace.config["model_type"] == "mistral" and {run.arm for run in trace.runs} >= {"full", "encoder"}
