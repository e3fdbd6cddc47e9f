"""Tests the files under packaging/: they parse, and agree with the package and with each other."""

import ast
import re

import pytest
from environments import requirements, setup_cfg
from launching import ROOT, needed

import mpiring
from mpiring.__main__ import parse

FOLDER = ROOT / "packaging"
CONDA, SPACK = FOLDER / "conda" / "recipe.yaml", FOLDER / "spack" / "package.py"
IMAGES = [FOLDER / "Dockerfile", FOLDER / "mpiring.def"]
# What conda calls otherwise than setup.cfg does.
NAMES = {"pytorch": "torch", "python-xxhash": "xxhash"}


def table():
    """Return what setup.cfg says of requirements: {"": {"numpy": "1.24", …}, "torch": …}."""
    return {extra: dict(re.match(r"([\w.-]+)(?:>=)?([\d.]*)", line).groups()
                        for line in requirements(extra))
            for extra in ["", *setup_cfg()["options.extras_require"]]}


def build_setuptools():
    return re.search(r'"setuptools>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]


def loaded(path):
    return needed("yaml").safe_load(path.read_text())


def directives(body, **held):
    """Yield name, arguments and options of each directive of Spack's package, without Spack."""
    for node in body:
        call = node.items[0].context_expr if isinstance(node, ast.With) else node.value
        if not isinstance(call, ast.Call):
            continue
        args = [ast.literal_eval(each) for each in call.args]
        options = {**held, **{each.arg: ast.literal_eval(each.value) for each in call.keywords}}
        if isinstance(node, ast.With):
            condition = {"when": args[0]} if call.func.id == "when" else {}
            yield from directives(node.body, **options, **condition)
        else:
            yield call.func.id, args, options


def test_spacks_package_asks_for_what_setup_cfg_does():
    package = next(node for node in ast.parse(SPACK.read_text()).body
                   if isinstance(node, ast.ClassDef))
    assert package.name == "PyMpiring"
    assert f'pypi = "mpiring/mpiring-{mpiring.__version__}.tar.gz"' in SPACK.read_text()
    calls = list(directives(package.body))
    assert [args[0] for name, args, _ in calls if name == "version"] == [mpiring.__version__]
    minimums = {extra: {} for extra in ["", *(args[0] for name, args, _ in calls
                                              if name == "variant")]}
    for name, args, options in calls:
        if name == "depends_on":
            package, _, least = args[0].removeprefix("py-").partition("@")
            extra = options.get("when", "+").removeprefix("+")
            assert options["type"] == ("build" if package == "setuptools" else ("build", "run"))
            minimums[extra][package.replace("ml-dtypes", "ml_dtypes")] = least.removesuffix(":")
    assert f">={minimums[''].pop('python')}" == setup_cfg()["options"]["python_requires"]
    assert minimums[""].pop("setuptools") == build_setuptools()
    assert minimums == {extra: table()[extra] for extra in minimums}


def test_condas_recipe_asks_for_what_setup_cfg_does():
    recipe = loaded(CONDA)
    assert recipe["schema_version"] == 1
    assert recipe["context"] == {"name": "mpiring", "version": mpiring.__version__}
    assert recipe["build"]["noarch"] == "python"
    least = dict(line.split(" >=") for line in recipe["requirements"]["run"])
    # conda-forge's own least version of Python, which may be later.
    assert least.pop("python") == "${{ python_min }}"
    assert least == table()[""]
    assert f"setuptools >={build_setuptools()}" in recipe["requirements"]["host"]
    further = {**table()["torch"], **table()["fast"]}
    for line in recipe["requirements"]["run_constraints"]:
        name, _, version = line.partition(" >=")
        assert further[NAMES.get(name, name)] == version
    for test in recipe["tests"]:
        for name in test.get("files", {}).get("source", []):
            assert (ROOT / name).is_file()
        for module in test.get("python", {}).get("imports", []):
            __import__(module)


def test_a_job_for_kubernetes():
    job = loaded(FOLDER / "mpijob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    replicas = spec["mpiReplicaSpecs"]
    launcher, worker = (replicas[name]["template"]["spec"]["containers"][0]
                        for name in ("Launcher", "Worker"))
    ranks = spec["slotsPerWorker"] * replicas["Worker"]["replicas"]
    assert launcher["args"][:3] == ["mpirun", "-n", str(ranks)]
    assert worker["resources"]["limits"]["cpu"] == str(spec["slotsPerWorker"])
    assert launcher["image"] == worker["image"]
    assert launcher["image"].endswith(f"/mpiring:{mpiring.__version__}")
    # What it starts is in the image, under the same names.
    image = (FOLDER / "Dockerfile").read_text()
    script = next(word for word in launcher["args"] if word.endswith(".py"))
    assert (ROOT / script.removeprefix("/opt/mpiring/")).is_file()
    assert "COPY examples /opt/mpiring/examples" in image
    config = worker["args"][-1]
    port = worker["readinessProbe"]["tcpSocket"]["port"]
    assert f"> {config}" in image and image.count(f"'Port {port}'") == 2
    assert f"HostKey {spec['sshAuthMountPath']}/id_rsa" in image
    for container in launcher, worker:
        user = container["securityContext"]["runAsUser"]
        assert f"--uid {user} " in image and f"\nUSER {user}\n" in image
    (mount,) = worker["volumeMounts"]
    (volume,) = replicas["Worker"]["template"]["spec"]["volumes"]
    assert mount["mountPath"] == "/dev/shm" and mount["name"] == volume["name"]
    assert volume["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_images_install_what_there_is(path):
    text = path.read_text()
    # Which extras an image takes by default, by the name of its option.
    options = dict(re.findall(r"^(?:ARG |    )(MPI|EXTRAS)=(\w+)$", text, re.MULTILINE))
    assert options == {"MPI": "mpich", "EXTRAS": "examples"}
    assert {*options.values(), "openmpi", "torch", "fast"} <= table().keys()
    copied = (re.findall(r"^COPY ((?:\S+ )+)\S+$", text, re.MULTILINE)
              or re.findall(r"^    ((?![#/])\S+) /opt/mpiring", text, re.MULTILINE))
    names = [name for names in copied for name in names.split()]
    assert {"setup.cfg", "pyproject.toml", "mpiring", "examples", "LICENSE",
            "packaging/description.md"} <= set(names), "setuptools needs all of them"
    names += re.findall(r"(?:docs|packaging)/[\w/.]+\w", text)
    assert all((ROOT / name).exists() for name in names)
    # Both are the same.
    for line in ["debian:trixie-slim\n", "python3 -m venv /opt/venv",
                 "/opt/venv/bin/pip install --no-cache-dir",
                 "PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin"]:
        assert line in text


def test_files_that_name_the_project_in_an_index_have_its_name():
    """Whoever must change the name changes setup.cfg, and then these."""
    name = setup_cfg()["metadata"]["name"]
    described = re.findall(r"pip install '?(\w+)", (FOLDER / "description.md").read_text())
    assert described and set(described) == {name}
    address = f"https://pypi.org/project/{name}/"
    for path, text in [(SPACK, f'pypi = "{name}/{name}-'), (CONDA, address),
                       (ROOT / "mpiring" / "remedies.py", f'metadata.distribution("{name}")'),
                       (ROOT / "CONTRIBUTING.md", f"`pip index versions {name}`")]:
        assert text in path.read_text(), path


def test_commands_name_the_image_of_this_version():
    files = [*(ROOT / "docs" / "how_to").iterdir(), *(path for path in FOLDER.iterdir()
                                                      if path.is_file())]
    tags = [tag for path in files for tag in re.findall(r"mpiring:(\d[\d.]*)", path.read_text())]
    assert len(tags) > 8 and set(tags) == {mpiring.__version__}


def test_the_commands_that_files_name_exist():
    """Those of mpiring, wherever they stand: also in comments, and as lists of words."""
    commands = [command for path in FOLDER.rglob("*") if path.is_file()
                for command in re.findall(r'-m"?,? "?mpiring"?,? "?(\w+)', path.read_text())]
    for command in commands:
        parse([command])
    assert len(commands) >= 5
