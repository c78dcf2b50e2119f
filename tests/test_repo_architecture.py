"""The house: which folder may import which, what is packaged, how long files are. Reads sources, runs nothing."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("inspector", "model", "kernels", "ui", "traces")
# folder -> folders of the project it may import. `inspector.parser` starts `ui` commands through LAZY.
ARROWS = {
    "kernels": set(),
    "traces": set(),
    "model": {"kernels"},
    "inspector": {"kernels", "traces", "model"},
    "ui": {"traces", "inspector"},
}
# Modules that reach into another folder all the same, and only inside functions.
LAZY = {("inspector.commands", "ui"), ("inspector.listing", "ui")}
# Third-party packages that each folder may import, besides those of the folders it may import.
PACKAGES = {
    "kernels": {"torch", "triton"},
    "traces": {"numpy", "h5py"},
    "model": {"torch", "numpy", "safetensors", "tqdm", "transformers", "huggingface_hub", "greenlet"},
    "inspector": {"torch", "numpy", "tqdm", "transformers"},
    "ui": {"numpy", "plotly", "gradio", "fastapi", "starlette", "uvicorn", "kaleido", "matplotlib"},
}
LONG = 400


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).glob("*.py"))


def module_of(path: Path) -> str:
    return f"{path.parent.name}.{path.stem}"


def imports(path: Path) -> list[tuple[str, bool]]:
    """Every imported module of a file as (dotted name, whether it is imported when the file is).

    `from replayscope.x import y` counts as `replayscope.x.y` if that is a file, so that arrows between files are seen.
    """
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(node)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}: a relative import; write replayscope.…"
            names = []
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                names.append(dotted if _file(dotted) else str(node.module))
        else:
            continue
        found += [(name, node not in inside) for name in names]
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _file(dotted: str) -> Path | None:
    """The file of `replayscope.x.y`, or of the package `replayscope.x`."""
    parts = dotted.split(".")
    if parts[0] != "replayscope" or len(parts) < 2:
        return None
    path = ROOT / parts[1] / (f"{parts[2]}.py" if len(parts) > 2 else "__init__.py")
    return path if path.is_file() else None


def loaded(path: Path, seen: set[Path] | None = None) -> set[str]:
    """Third-party packages that importing a file brings in, through the project's own files too."""
    seen = set() if seen is None else seen
    if path in seen:
        return set()
    seen.add(path)
    packages = set()
    for name, at_once in imports(path):
        if not at_once:
            continue
        if name.startswith("replayscope."):
            for file in (_file(".".join(name.split(".")[:2])), _file(name)):
                if file:
                    packages |= loaded(file, seen)
        else:
            packages.add(name.split(".")[0])
    return packages


@pytest.mark.parametrize("path", sources(*FOLDERS), ids=module_of)
def test_imports_follow_the_arrows(path):
    folder = path.parent.name
    allowed = set().union(*(PACKAGES[other] for other in (folder, *ARROWS[folder])))
    for name, at_once in imports(path):
        parts = name.split(".")
        if parts[0] == "replayscope":
            other = parts[1]
            lazily = (module_of(path), other) in LAZY and not at_once
            assert other == folder or other in ARROWS[folder] or lazily, f"{folder} must not import {name}"
        else:
            assert parts[0] not in FOLDERS, f"{name} is imported by its bare name; write replayscope.{name}"
            known = parts[0] in allowed or parts[0] in sys.stdlib_module_names
            assert known, f"{module_of(path)} imports {name}: not among the packages of {folder}"


def torch_free() -> list[str]:
    """The files of inspector that docs/architecture.md promises to be free of torch."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^Torch-free half of `inspector`: (.*)$", text, re.MULTILINE)
    return re.findall(r"`(\w+)`", line)


@pytest.mark.parametrize("name", torch_free())
def test_the_torch_free_half_loads_no_torch(name):
    assert not {"torch", "triton", "plotly", "gradio"} & loaded(ROOT / "inspector" / f"{name}.py")


@pytest.mark.parametrize("path", sources("ui", "traces"), ids=module_of)
def test_what_opens_a_trace_loads_no_torch(path):
    assert not {"torch", "triton"} & loaded(path)


def test_pickles_are_opened_in_one_place_and_as_plain_tensors_only():
    """torch.load and numpy's pickles run code from a file unless they are told not to."""
    found = {}
    for path in sources(*FOLDERS):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "pickle.load"):
                told = {word.arg: ast.unparse(word.value) for word in node.keywords}
                found.setdefault(module_of(path), []).append((ast.unparse(node.func), told))
    assert set(found) <= {"inspector.dumps"}, found
    for function, told in found["inspector.dumps"]:
        asked = {"torch.load": ("weights_only", "True"), "np.load": ("allow_pickle", "False")}[function]
        assert told.get(asked[0]) == asked[1], function


def test_tests_and_benchmarks_use_the_packaged_names():
    for path in sources("tests", "benchmarks"):
        bare = [name for name, _ in imports(path) if name.split(".")[0] in FOLDERS]
        assert not bare, f"{path.name} imports {bare}; write replayscope.…"


def test_every_folder_is_packaged_and_nothing_else():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    expected = {f"replayscope.{folder}": folder for folder in FOLDERS}
    assert config["package-dir"] == expected and set(config["packages"]) == set(expected)


def test_folders_are_flat_and_kernels_is_no_regular_package():
    assert not (ROOT / "kernels" / "__init__.py").exists(), "with it, transformers would import our folder as its own"
    assert not (ROOT / "replayscope").exists()
    for folder in FOLDERS:
        assert folder == "kernels" or (ROOT / folder / "__init__.py").is_file()
        nested = [path for path in (ROOT / folder).glob("*/*.py") if "__pycache__" not in path.parts]
        assert not nested, f"{nested} would be missing from the wheel"


def test_data_files_are_declared():
    """Every file of a package folder that is not Python must match the package data, or the wheel lacks it."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for folder in FOLDERS:
        patterns = data.get(f"replayscope.{folder}", [])
        for path in (ROOT / folder).rglob("*"):
            if path.is_dir() or path.suffix in (".py", ".pyc", ".partial"):
                continue
            inside = path.relative_to(ROOT / folder)
            assert any(inside.match(pattern) for pattern in patterns), f"{path.relative_to(ROOT)} is in no package"


def test_links_for_the_type_checker_point_at_the_folders():
    for folder in FOLDERS:
        assert (ROOT / "typings" / "replayscope" / folder).resolve() == ROOT / folder


def test_tests_are_flat_and_named_after_their_folder():
    names = "|".join((*FOLDERS, "repo", "look", "cases"))
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert path.parent == ROOT / "tests", f"{path} lies in a folder"
        assert re.match(rf"test_({names})_\w+\.py", path.name), f"{path.name} is not test_<folder>_<subject>.py"


def test_files_stay_short():
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(*FOLDERS, "tests", "benchmarks")
    }
    long = {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > LONG}
    assert not long, f"split what has more than {LONG} lines: {long}"
