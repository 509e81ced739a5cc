"""The folder holds to its own rules: who imports whom, how long things are, what is never called.

Everything is read from the source by `ast`; nothing of the product is imported in this process.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["cli", "model", "data", "training", "tools", "config"]
SCRIPTS = ["train.py", "sample.py"]
LEVELS = {"cli": 0, "model": 1, "data": 1, "training": 2, "tools": 3, "config": 3}
LEVELS |= {"train": 3, "sample": 3}
MAY_IMPORT_ITSELF = {"cli", "model", "data", "training", "config"}
OPTIONAL = {"wandb", "datasets", "transformers", "onnx", "onnxruntime", "onnxscript", "pyarrow"}
OPTIONAL |= {"matplotlib", "plotly"}

LONGEST_FUNCTION = 60
LONGEST_MAIN = 90  # train.py's, which reads from top to bottom


def product_files() -> list[Path]:
    """Every Python file that a user runs, relative to the root."""
    found = [ROOT / script for script in SCRIPTS if (ROOT / script).exists()]
    for package in PACKAGES:
        found += sorted((ROOT / package).glob("**/*.py"))
    return [file.relative_to(ROOT) for file in found]


FILES = product_files()
TREES = {file: ast.parse((ROOT / file).read_text(encoding="utf-8")) for file in FILES}
MODULES = {".".join(file.with_suffix("").parts).removesuffix(".__init__"): file for file in FILES}


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all that is imported anywhere; what comes `from` a module may be one too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def at_import_time(tree: ast.Module) -> list[ast.stmt]:
    """The statements that run when the module is imported, `if` at the top level looked into."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.If):
            guard = ast.unparse(node.test)
            found += [] if "__name__" in guard else [node, *node.body, *node.orelse]
        else:
            found.append(node)
    return found


def own_imports(file: Path) -> set[str]:
    """Our own modules that a file imports."""
    return {name for name in imports(TREES[file]) if name in MODULES}


def each(files=FILES):
    return pytest.mark.parametrize("file", files, ids=str)


# Who imports whom


def test_there_is_something_to_look_at():
    assert len(FILES) > 20
    assert Path("train.py") in FILES
    assert Path("sample.py") in FILES


@each()
def test_a_module_imports_only_what_is_below_it(file):
    own = file.parts[0].removesuffix(".py")
    for name in imports(TREES[file]):
        other = name.partition(".")[0]
        assert other != "", f"{file}: relative import {name}: write it from the root"
        if other in LEVELS:
            below = LEVELS[other] < LEVELS[own]
            inside = own == other and own in MAY_IMPORT_ITSELF
            # A tool too long for one file is a package.
            parts_of_one = len(file.parts) > 2 and name.startswith(".".join(file.parts[:2]))
            assert below or inside or parts_of_one, f"{file} imports {name}"


def test_no_module_imports_itself_by_way_of_others():
    graph = {name: own_imports(file) - {name} for name, file in MODULES.items()}

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        for other in sorted(graph.get(name, ())):
            walk(other, (*path, name))
        graph[name] = set()  # no cycle below: never again

    for name in sorted(graph):
        walk(name, ())


@each()
def test_optional_libraries_are_imported_where_they_are_used(file):
    for statement in at_import_time(TREES[file]):
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            libraries = {name.partition(".")[0] for name in imports(statement)}
            assert not libraries & OPTIONAL, f"{file}:{statement.lineno}"


@each([file for file in FILES if file.parts[0] == "model"])
def test_the_network_needs_torch_alone(file):
    allowed = {"torch", "model", "cli", *sys.stdlib_module_names}
    if file.name == "huggingface.py":
        allowed |= {"safetensors"}
    assert {name.partition(".")[0] for name in imports(TREES[file])} <= allowed


@each([file for file in FILES if file.name == "__init__.py"])
def test_a_package_holds_a_docstring_only(file):
    assert ast.get_docstring(TREES[file])
    assert len(TREES[file].body) == 1


@each()
def test_nothing_happens_at_import_time(file):
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    allowed += (ast.AsyncFunctionDef, ast.AugAssign, ast.If)
    for statement in at_import_time(TREES[file]):
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        assert is_docstring or isinstance(statement, allowed), f"{file}:{statement.lineno}"


def run_python(code: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("module", ["training.config", "config.small"])
def test_a_config_needs_the_standard_library_alone(module):
    said = run_python(f"import sys, {module}; print(*sys.modules)")
    loaded = {name.partition(".")[0] for name in said.split()}
    foreign = {"torch", "numpy", "tokenizers", "tiktoken", "datasets", "tqdm", "safetensors"}
    assert not loaded & foreign


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_comes_at_once(script):
    run = f"import runpy, sys; sys.argv = ['{script}', '--help']\n"
    run += f"try:\n    runpy.run_path('{script}', run_name='__main__')\n"
    run += "except SystemExit as stop:\n    assert not stop.code\n"
    began = time.perf_counter()
    said = run_python(run + "assert 'torch' not in sys.modules")
    assert "usage: python " + script in said
    assert time.perf_counter() - began < 5  # 0.2 s on an idle machine


# How long things are


@each()
def test_a_function_fits_on_a_page(file):
    for node in ast.walk(TREES[file]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            is_main = (str(file), node.name) == ("train.py", "main")
            allowed = LONGEST_MAIN if is_main else LONGEST_FUNCTION
            assert length <= allowed, f"{file}:{node.lineno} {node.name} has {length} lines"


@each()
def test_a_file_is_named_for_its_subject(file):
    assert file.name != "utils.py"


# Options


def section_classes() -> dict[str, ast.ClassDef]:
    """{"model": the class ModelConfig, ...}, from the sources."""
    classes = {}
    for tree in TREES.values():
        classes |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    fields = [node for node in classes["Config"].body if isinstance(node, ast.AnnAssign)]
    types = {field.target.id: ast.unparse(field.annotation) for field in fields}
    return {name: classes[kind] for name, kind in types.items() if kind in classes}


SECTIONS = section_classes()
OPTIONS = [
    (section, node.target.id)
    for section, cls in SECTIONS.items()
    for node in cls.body
    if isinstance(node, ast.AnnAssign)
]


def reads(node: ast.AST, inside: str = "") -> Iterator[tuple[str, str, str]]:
    """(receiver, name, class around it) of every `receiver.name` that is read and not called."""
    for child in ast.iter_child_nodes(node):
        is_called = isinstance(node, ast.Call) and child is node.func
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load) and not is_called:
            receiver = getattr(child.value, "attr", getattr(child.value, "id", ""))
            yield receiver, child.attr, inside
        yield from reads(child, child.name if isinstance(child, ast.ClassDef) else inside)


READS = {read for tree in TREES.values() for read in reads(tree)}


def fields_read(section: str) -> set[str]:
    """Names read as `<section>.x`, `<section>_config.x` or `config.x`, with anything before it,
    outside of the section's own class."""
    readers = {section, f"{section}_config", "config"}
    own = SECTIONS[section].name
    return {name for receiver, name, inside in READS if receiver in readers and inside != own}


def test_every_option_has_a_name_of_its_own():
    names = [name for _, name in OPTIONS]
    assert len(names) > 50
    twice = {name for name in names if names.count(name) > 1}
    assert not twice
    assert not set(names) & {"help", "print_config"}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_option_is_obeyed(section):
    unread = {name for owner, name in OPTIONS if owner == section} - fields_read(section)
    assert not unread, f"nothing reads {section}.{sorted(unread)} (as {section}.x or config.x)"


@pytest.mark.parametrize(("section", "name"), OPTIONS, ids=[".".join(option) for option in OPTIONS])
def test_every_option_says_in_a_line_what_it_is(section, name):
    field = next(
        node
        for node in SECTIONS[section].body
        if isinstance(node, ast.AnnAssign) and node.target.id == name
    )
    assert isinstance(field.annotation, ast.Subscript)
    assert field.annotation.value.id == "Annotated"
    text = ast.literal_eval(field.annotation.slice.elts[1])
    assert 3 <= len(text) <= 160
    assert "\n" not in text


# What is never called


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keywords(call: ast.Call) -> dict[str | None, str]:
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}


@each()
def test_a_file_from_elsewhere_is_never_executed(file):
    for name, call in calls(TREES[file]):
        where = f"{file}:{call.lineno} {name}"
        assert name not in ("eval", "exec", "yaml.load", "__import__"), where
        assert not name.startswith(("pickle.", "marshal.", "shelve.", "dill.", "joblib.")), where
        assert keywords(call).get("trust_remote_code", "False") == "False", where
        assert keywords(call).get("allow_pickle", "False") == "False", where
        assert keywords(call).get("shell", "False") == "False", where
        if name == "torch.load":
            assert keywords(call).get("weights_only") == "True", where
    unpicklers = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal"}
    assert not {name.partition(".")[0] for name in imports(TREES[file])} & unpicklers


@each([file for file in FILES if file.parts[0] != "tools"])
def test_the_environment_is_read_in_one_place(file):
    if file == Path("training/distributed.py"):
        return
    tiktokens = ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR")
    read_where_used = ("NO_COLOR", "LOCAL_RANK", *tiktokens)
    tree = TREES[file]
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
            use = ast.unparse(parents.get(parents.get(node), node)) + ast.unparse(parents[node])
            assert any(name in use for name in read_where_used), f"{file}:{node.lineno}"


@each()
def test_no_globals_and_nothing_left_to_do(file):
    assert not [node for node in ast.walk(TREES[file]) if isinstance(node, ast.Global)]
    text = (ROOT / file).read_text(encoding="utf-8")
    assert not [word for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X") if word in text]


# What the docs say of it


def told_tree() -> list[str]:
    """The paths in docs/files.md: one line per path, the files of a folder indented below it."""
    blocks = (ROOT / "docs/files.md").read_text(encoding="utf-8").split("```")[1::2]
    tree = next((block for block in blocks if "\nmodel/ " in block), None)
    assert tree, "docs/files.md has no block with a line for model/ and one for each file in it"
    found, folder = [], ""
    for line in filter(str.strip, tree.splitlines()):
        name = line.split()[0]
        folder = folder if line.startswith(" ") else ""
        found.append(folder + name)
        folder = name if name.endswith("/") else folder
    return found


def test_the_file_tree_in_the_docs_is_the_real_one():
    told = told_tree()
    real = {file.as_posix() for file in FILES if file.name != "__init__.py"}
    assert len(set(told)) == len(told)
    assert not [path for path in told if not (ROOT / path).exists()]
    missing = sorted(real - set(told))
    assert not missing, f"docs/files.md needs a line for each of {missing}"
    assert {"docs/", "tests/", "README.md", "LICENSE", "requirements.txt"} <= set(told)


# What to read first. Together these files are the whole way of a batch.
SPINE = {
    "": ["train", "sample"],
    "model": ["config", "gpt", "attention", "rope", "layers", "loss", "generate"],
    "data": ["shards", "loader"],
    "training": ["startup", "run", "step", "optimizer", "evaluate", "checkpoint", "logger"],
}


def test_the_readme_names_the_files_of_the_spine_and_every_folder():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for folder, names in SPINE.items():
        row = next((line for line in readme.splitlines() if line.startswith(f"| `{folder}/`")), "")
        for name in names:
            assert Path(folder, f"{name}.py") in FILES
            assert f"`{name}.py`" in (row or readme), f"{folder}/{name}.py"
    for folder in [*PACKAGES, "docs", "tests"]:
        assert f"`{folder}/`" in readme, f"README.md does not say what {folder}/ is for"
