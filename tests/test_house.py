"""Holds the code to the rules of the house: layers, size, docstrings, exports, light imports."""

import ast
import collections
import functools
import importlib
import inspect
import re

import interface
import pytest
from launching import ROOT, python, tracked_files

PACKAGE = ROOT / "mpiring"
FILES = sorted(PACKAGE.rglob("*.py"))
# Studies are not in the wheel, but most rules are theirs, too.
ALL_FILES = FILES + sorted((ROOT / "benchmarks").glob("*.py"))

# Rooms are the package's folders, and the files beside them. Imports go to the same or a lower
# layer, and files make no circle.
LAYERS = [
    ["errors", "arguments", "names", "text", "files", "remedies"],
    ["config", "jit", "memory"],
    ["gpu", "progress"],
    ["launch", "transport", "buckets"],
    ["sharding"],
    ["collectives"],
    ["operations"],
    ["record"],
    ["engine"],
    ["communicator"],
    ["world"],
    ["gpus", "reducers", "resilience", "data"],
    ["training"],
    ["optim"],
    ["numpy", "torch"],
    ["provisional"],
    # The guests: the layers below import none of them.
    ["simulated", "asynchronous", "elastic"],
    ["horovod"],
    ["tools"],
    ["__main__", "__init__"],
]
GUESTS = ("simulated", "asynchronous", "elastic", "horovod", "tools")
# Modules of users that export no list of names.
LISTED = {"mpiring.gpus": ["cupy_for"], "mpiring.progress": ["Progress"]}
# What users of PyTorch and of NumPy know by the same names.
OF_EACH_ADAPTER = {"AsyncDataParallel", "Checkpoints", "DataParallel", "DiLoCo", "LocalSGD",
                   "TrainState"}
# Constructors of more than 8 arguments: users pass them by keyword.
KEYWORDS = {"Adam", "AdamW", "DataParallel", "LAMB", "LARS", "SGD", "StreamingDiLoCo"}
ENVIRONMENT_READERS = {"config.py", "launch/environment.py"}
# All others open files by `mpiring.files`, as another user may have prepared the folder: the tools
# open what their user names, the rest what the kernel makes.
FILE_OPENERS = {"files.py", "memory/window.py", "tools/bench/benchmark.py", "tools/bench/memory.py",
                "tools/lab/lab.py", "tools/output.py"}
OPENING = (r"(?<!def )(?<![.\w])open\((?!.*opener=)|\bos\.(open|replace)\("
           r"|\.write_(text|bytes)\(|\bmkstemp\(")
LONG_FILES: dict[str, str] = {}  # files of more than 400 lines of code: why they are one
MPI_USERS = {"transport/mpi.py", "transport/survivors.py", "launch/start.py", "engine/group.py",
             "engine/opening.py", "communicator.py", "launch/gpu_aware.py",
             "tools/doctor/examine.py", "benchmarks/start_rank.py"}


def name_of(path):
    return str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT))


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer_of(room):
    return next(i for i, rooms in enumerate(LAYERS) if room in rooms)


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def imports_of(path, types=False):
    """Return the files of the package that a file imports; on request, also what types need."""
    files = set()
    inside = path.relative_to(PACKAGE).parts
    for node in (node for top in tree_of(path).body
                 if types or not isinstance(top, ast.If) or "TYPE_CHECKING" not in ast.dump(top)
                 for node in ast.walk(top)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = PACKAGE.joinpath(*inside[:len(inside) - node.level],
                                    *(node.module or "").split("."))
            for alias in node.names:
                candidates = (base / f"{alias.name}.py", base / alias.name / "__init__.py",
                              base.with_suffix(".py"), base / "__init__.py")
                files.add(next(file for file in candidates if file.exists()))
    return files


def tool_of(path):
    """Return the folder of a command, or None."""
    parts = path.relative_to(PACKAGE).parts
    return parts[1] if parts[0] == "tools" and len(parts) > 2 else None


def test_imports_go_down_only():
    upward = []
    for path in FILES:
        room = room_of(path)
        # The version is in __init__.
        rooms = {room_of(file) for file in imports_of(path) - {PACKAGE / "__init__.py"}}
        upward += [f"{name_of(path)} imports {other}" for other in rooms
                   if layer_of(other) > layer_of(room)]
    assert not upward


def exported(module):
    """Return the names that the door, or a module of users, exports; else none."""
    if module not in {"mpiring.provisional", *interface.MODULES}:
        return LISTED.get(module, [])
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return [*next(ast.literal_eval(node.value) for node in tree_of(path).body
                  if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"),
            "__version__"]


def names_from_core(path):
    """Yield the module and the name of what a file imports from the package without its guests."""
    folders = path.relative_to(ROOT).parts
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            module = ".".join([*folders[:-node.level or -len(folders)],
                               *filter(None, [node.module])])
            for alias in node.names:
                whole = f"{module}.{alias.name}".split(".")
                if whole[0] == "mpiring" and whole[1] not in GUESTS:
                    yield module, alias.name


def shown_by(room):
    """Return the names that a folder of the package shows, which its `__init__` imports."""
    return {alias.name for node in tree_of(PACKAGE / room / "__init__.py").body
            if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_guests_stand_on_the_door():
    """Of the core, they import names that users import, and those of the door."""
    wrong = []
    for path in ALL_FILES:
        if path.is_relative_to(PACKAGE) and room_of(path) not in GUESTS:
            continue
        names = [*names_from_core(path)]
        wrong += [f"{name_of(path)} imports {name} of {module}" for module, name in names
                  if name not in exported(module)]
        rooms = {name for _, name in names if (PACKAGE / name / "__init__.py").exists()}
        wrong += [f"{name_of(path)}: {ast.unparse(node)}" for node in ast.walk(tree_of(path))
                  if isinstance(node, ast.Attribute) and ast.unparse(node.value) in rooms
                  and node.attr not in shown_by(ast.unparse(node.value))]
    assert not wrong
    assert len(exported("mpiring.provisional")) - 1 <= 30


def test_one_file_knows_the_insides_of_pytorch():
    inside = re.compile(r"\b(torch|dist|nn|Variable)(\.\w+)*\._[a-z]\w*"
                        r"|^from torch.* import (.*\W)?_\w"
                        r"|(?<!self)\._(parameters|buffers|modules|version|values|nnz|indices|"
                        r"execution_engine|compiled_call_impl|orig_mod|optimizer_\w+_hooks)\b")
    assert not [f"{name_of(path)}:{number}: {line.strip()}" for path in FILES
                if "torch" in path.relative_to(PACKAGE).parts and path.name != "private.py"
                for number, line in enumerate(path.read_text().splitlines(), 1)
                if inside.search(line)]


def test_no_tool_imports_another():
    assert not [f"{name_of(path)} imports {name_of(file)}"
                for path in FILES if tool_of(path) for file in imports_of(path)
                if tool_of(file) not in (None, tool_of(path))]


def test_imports_make_no_circle():
    """Nor do those that only types need, except within one folder."""
    graph = {path: {file for file in imports_of(path, types=True)
                    if file in imports_of(path) or room_of(file) != room_of(path)}
             for path in FILES if path.name != "__init__.py"}
    while graph:
        leaves = {file for file, needs in graph.items() if not needs & graph.keys()}
        assert leaves, f"a circle of imports among {sorted(map(name_of, graph))}"
        graph = {file: needs for file, needs in graph.items() if file not in leaves}


@functools.cache
def classes():
    """Return the classes of the package by name, each with its file."""
    named = collections.defaultdict(list)
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                named[node.name].append((node, path))
    return named


def test_a_class_name_means_one_thing():
    assert {name for name, definitions in classes().items()
            if len(definitions) > 1 and not name.startswith("_")} == OF_EACH_ADAPTER


def test_constructors_have_few_arguments():
    """A user's has keywords, which stay; any other one groups what belongs together."""
    long = set()
    for path in FILES:
        for node in (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)):
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                    arguments = len(function.args.args) - 1 + len(function.args.kwonlyargs)
                    long |= {node.name} if arguments > 8 else set()
    assert long == KEYWORDS


def docstring_lines(tree):
    """Return the numbers of the lines that are docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return {line for node in ast.walk(tree)
            if isinstance(node, documented) and ast.get_docstring(node) is not None
            for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)}


def code_lines(path):
    """Return the numbers of the lines that are neither empty, nor comments, nor docstrings."""
    docstrings = docstring_lines(tree_of(path))
    return {number for number, line in enumerate(path.read_text().splitlines(), 1)
            if line.strip() and not line.strip().startswith("#") and number not in docstrings}


def test_long_files_say_why_they_are_one():
    """A class is not cut to fit. A file of many lines has a reason, which stands by its name."""
    long = {name_of(path) for path in ALL_FILES if len(code_lines(path)) > 400}
    assert long == LONG_FILES.keys()


def test_functions_are_short():
    long = []
    for path in ALL_FILES:
        docstrings = docstring_lines(tree_of(path))
        lengths = {f"{name_of(path)}: {node.name}":
                   len(set(range(node.lineno, node.end_lineno + 1)) - docstrings)
                   for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)}
        long += [f"{name} has {length} lines" for name, length in lengths.items() if length > 40]
    assert not long


def bases_of(scope, path):
    """Yield the bases of a class that are in the package: of its file, or imported from another."""
    here = {name for top in tree_of(path).body for name in (
        [top.name] if isinstance(top, ast.ClassDef) else
        [alias.asname or alias.name for alias in top.names]
        if isinstance(top, ast.ImportFrom) and top.level else [])}
    for base in scope.bases:
        names = re.sub(r"\[.*", "", ast.unparse(base)).split(".")
        is_here = names[0] in here and names[-1] != scope.name
        for base_class in classes()[names[-1]] if is_here else ():
            yield base_class[0]
            yield from bases_of(*base_class)


def is_told(node, scope, path):
    """Return whether a node has a docstring, or overrides a method that has one."""
    if isinstance(scope, ast.Module) or isinstance(node, ast.ClassDef):
        return bool(ast.get_docstring(node))
    return any(ast.get_docstring(method) for each in (scope, *bases_of(scope, path))
               for method in each.body
               if isinstance(method, ast.FunctionDef) and method.name == node.name)


def test_everything_public_is_told():
    silent = []
    for path in ALL_FILES:
        tree = tree_of(path)
        first = (ast.get_docstring(tree) or "").partition("\n")[0]
        # The first line says what the file does.
        silent += [name_of(path)] if not first.endswith((".", ":")) and "," not in first else []
        scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef)
                          and not node.name.startswith("_"))]
        silent += [f"{name_of(path)}: {node.name}" for scope in scopes for node in scope.body
                   if isinstance(node, ast.FunctionDef | ast.ClassDef)
                   and not node.name.startswith("_") and not is_told(node, scope, path)
                   and "overload" not in map(ast.unparse, node.decorator_list)]
    assert not silent


# PyTorch's functions that make tensors on the default device, or move them there.
ON_DEFAULT_DEVICE = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace",
    "logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor",
    "sparse_coo_tensor", "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros"}


def test_tensors_name_their_device():
    """Else they follow `torch.set_default_device`, wherever the user's model may be."""
    assert not [f"{name_of(path)}:{call.lineno}: {ast.unparse(call)}" for path in FILES
                for call in ast.walk(tree_of(path)) if isinstance(call, ast.Call)
                and re.fullmatch(r"torch\.(\w+)", called := ast.unparse(call.func))
                and called.removeprefix("torch.") in ON_DEFAULT_DEVICE
                and "device" not in [keyword.arg for keyword in call.keywords]]


FORBIDDEN = {  # what no file may have, but those that are for it
    "asserts are no checks of input": (r"^\s*assert ", ()),
    "nothing is left to do": (r"\b(TODO|FIXME|XXX)\b", ()),
    "the environment is read elsewhere": (r"\b(environ|getenv)\b", ENVIRONMENT_READERS),
    "mpi4py is imported elsewhere": (r"^\s*(from|import) mpi4py", MPI_USERS),
    "the package needs no study": (r"^\s*(from|import) benchmarks\b", ()),
    "files are opened by mpiring.files": (OPENING, FILE_OPENERS),
    "what pip installs is said by mpiring.remedies": (r"pip install|mpiring\[", ("remedies.py",)),
}


@pytest.mark.parametrize("reason", FORBIDDEN)
def test_forbidden_things(reason):
    pattern, allowed = FORBIDDEN[reason]
    assert not [name_of(path) for path in ALL_FILES if name_of(path) not in allowed
                and re.search(pattern, path.read_text(), re.MULTILINE)]


def test_no_file_is_called_utils():
    assert not [name_of(path) for path in FILES if {"utils", "helpers", "core"}
                & set(path.relative_to(PACKAGE).with_suffix("").parts)]


def test_collectives_say_whether_they_block():
    from mpiring import Communicator
    for name in ("empty", "allreduce", "iallreduce", "reduce_scatter", "allgather", "broadcast",
                 "barrier", "broadcast_object", "allgather_object", "split", "close", "submit",
                 "run", "messages", "survivors", "abandon", "tune", "prepare"):
        text = inspect.getdoc(getattr(Communicator, name))
        assert re.search(r"^Collective: .*Blocking: (yes|no)\.", text, re.MULTILINE), name


def test_exports():
    package = importlib.import_module("mpiring")
    assert package.__all__ == sorted(package.__all__)
    errors = importlib.import_module("mpiring.errors")
    for name, item in vars(errors).items():
        if inspect.isclass(item):
            assert name in package.__all__ and name in errors.__doc__, name


def test_import_is_light_and_starts_no_mpi():
    """The promise is 0.2 s beyond NumPy; only a gross breach fails, since machines differ.

    Of the process's own time: others may keep every core busy.
    """
    code = ("import time, sys, numpy; began = time.process_time(); import mpiring, mpiring.numpy; "
            "print(time.process_time() - began, *sys.modules)")
    seconds, *loaded = python("-c", code).stdout.split()
    third_party = {"torch", "cupy", "sklearn", "scipy", "tqdm", "ml_dtypes", "matplotlib", "numba",
                   "xxhash"}
    assert not {"mpi4py.MPI", *third_party} & set(loaded) and float(seconds) < 1.0


def test_the_tree_is_clean():
    assert not [name for name in tracked_files()
                if re.search(r"(\.pyc|\.egg-info|__pycache__|\.so)$", name)
                or (ROOT / name).stat().st_size > 200_000]
