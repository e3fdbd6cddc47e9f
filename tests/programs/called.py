"""Calls a function of a test module on each rank, for the fixture `ranks` (tests/conftest.py).

    mpiexec -n 2 python tests/programs/called.py MODULE FILE FOLDER
"""

import importlib.util
import pickle
import sys
from pathlib import Path

import mpiring

name, file, folder = sys.argv[1:]
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
spec = importlib.util.spec_from_file_location(name, file)
# The name that it has in pytest, so that its classes can be pickled.
sys.modules[name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
function, arguments = pickle.loads(Path(folder, "call").read_bytes())
with mpiring.init() as comm:
    result = pickle.dumps(function(comm, *arguments))
    Path(folder, f"result-{comm.rank}").write_bytes(result)
