"""Tests which states can be saved, and that they come back as they were, to the bit."""

import collections
import math
import random
from concurrent.futures import Future

import ml_dtypes
import numpy as np
import pytest
import simulated_gpu
from checkpointing import same
from launching import needed

from mpiring.errors import CheckpointError, ConfigError
from mpiring.resilience import random_state, set_random_state
from mpiring.resilience.checkpoint_file import Copy, read
from mpiring.resilience.tree import Arrays, DeviceArrays, Scalars, outline, rebuild

KINDS = (Arrays(), Scalars())


def written(tree, folder, kinds=KINDS, copy=None):
    """Write a tree to a file; return the file."""
    copy, digest = copy or Copy(), Future()
    copy.take(outline(tree, kinds, "state"))
    digest.set_result(copy.digest(fast=True))
    return folder / copy.write(folder, "part", digest)


def there_and_back(tree, folder, kinds=KINDS):
    path = written(tree, folder, kinds)
    content = read(path, path.stat().st_size)
    return rebuild(content.text, content.data, kinds)


def test_numbers_texts_and_nests_come_back(tmp_path):
    tree = {
        "none": None, "yes": True, "one": 1, "float": 1.0, "tiny": 5e-324, "third": 1 / 3,
        "large": 2**200, "negative": -0.0, "inf": [math.inf, -math.inf, math.nan],
        "text": "ä\n\x00🙂", "": {}, "list": [[], (), ((1,), [2])],
        "keys": {0: "a", "0": "b", True: "c", -5: "d", 7: "e"},
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "counter": collections.Counter({30: 2, 10: 1, 5: 0}),
        # What looks like the notation itself.
        "array": {"array": "x", "dtype": "float32", "shape": [1]}, "dict": {"dict": [["a", 1]]},
        "tuple": {"tuple": [1]}, "metadata": {"metadata": 1}}
    back = there_and_back(tree, tmp_path)
    assert same(back, tree)
    assert math.copysign(1, back["negative"]) == -1


@pytest.mark.parametrize("dtype", [
    *("float64 float32 float16 complex64 complex128 bool".split()),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), ml_dtypes.bfloat16])
def test_arrays_of_every_dtype_come_back(tmp_path, dtype):
    bits = np.random.default_rng(1).integers(0, 256, 16 * 12, np.uint8)
    bits &= 1 if dtype == "bool" else 255
    x = bits.view(dtype)[:12].copy()
    tree = {"vector": x, "matrix": x.reshape(3, 4), "fortran": np.asfortranarray(x.reshape(3, 4)),
            "strided": x[::-2], "one": x[3], "point": x[3:4].reshape(()), "empty": x[:0],
            "hollow": x[:0].reshape(3, 0, 2), "odd": x[:3], "bytes": np.arange(5, dtype=np.uint8)}
    back = there_and_back(tree, tmp_path)
    assert same(back, tree)
    back["vector"][...] = 0
    assert same(back["matrix"], tree["matrix"]), "arrays share no memory"


def test_names_in_the_file_are_paths_and_unique(tmp_path):
    x = np.arange(3.0)
    tree = {"a": {"b": x}, "a/b": x + 1, "a/b#2": x + 2, "__metadata__": x + 3, "l": [x + 4]}
    assert same(there_and_back(tree, tmp_path), tree)
    assert list(outline(tree, KINDS, "s").leaves)[0] == "a/b"
    assert same(there_and_back(x, tmp_path), x)


class Odd(int):
    pass


@pytest.mark.parametrize("tree, problem", [
    ({"optimizer": {"x": {1, 2}}}, r"state\['optimizer'\]\['x'\] is a builtins.set"),
    ([0, (1, [b"2"])], r"state\[1\]\[1\]\[0\] is a builtins.bytes"),
    ({"f": print}, r"state\['f'\] is a builtins.builtin_function_or_method"),
    ({"x": np.array(["text"])}, r"state\['x'\]: dtype '<?U?s?t?r?.*' cannot travel"),
    ({"x": np.array([None])}, r"state\['x'\]: dtype 'object' cannot travel"),
    ({"x": np.ones(2, ">f4")}, r"state\['x'\]: .*foreign byte order"),
    ({"x": np.longdouble(1)}, r"state\['x'\] is of longdouble, which the safetensors format"),
    ({"x": np.ma.ones(2)}, r"state\['x'\] is a numpy.ma.*Masked"),
    ({"x": 1j}, r"state\['x'\] is a builtins.complex"),
    ({"x": Odd(1)}, r"state\['x'\] is a .*Odd"),
    ({(1, 2): 3}, r"state has the key \(1, 2\), a tuple"),
    ({"a": {None: 3}}, r"state\['a'\] has the key None, a NoneType"),
    ({"a": {1.5: 3}}, r"state\['a'\] has the key 1.5, a float"),
])
def test_what_cannot_be_saved_is_named(tree, problem):
    with pytest.raises(ConfigError, match=problem):
        outline(tree, KINDS, "state")


def test_a_tree_in_itself_is_no_tree():
    tree = {}
    tree["again"] = tree
    with pytest.raises(ConfigError, match="does the tree contain itself"):
        outline(tree, KINDS, "state")


def test_random_numbers_go_on(tmp_path):
    generator = np.random.default_rng(5)
    generator.random(3), random.random(), np.random.standard_normal(3)
    state = {"global": random_state(), "mine": generator.bit_generator.state}
    expected = random.random(), np.random.standard_normal(2).tolist(), generator.random()
    back = there_and_back(state, tmp_path)
    set_random_state(back["global"])
    generator.bit_generator.state = back["mine"]
    assert expected == (random.random(), np.random.standard_normal(2).tolist(), generator.random())


def test_a_flipped_bit_anywhere_and_any_other_length_is_seen(tmp_path):
    path = written({"x": np.arange(3, dtype=np.int16), "y": 5, "z": np.zeros(0)}, tmp_path)
    good, nbytes = path.read_bytes(), path.stat().st_size
    for index in range(nbytes):
        bad = bytearray(good)
        bad[index] ^= 1 << index % 8
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match="not have the content that was written"):
            read(path, nbytes)
    for bad in (good[:-1], good + b"0", b""):
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=f"has {len(bad)} bytes instead of {nbytes}"):
            read(path, nbytes)
        with pytest.raises(CheckpointError, match="not have the content"):
            read(path, len(bad))
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        read(path, nbytes)


def test_states_of_pytorch_come_back(tmp_path):
    torch = needed("torch")
    from mpiring.torch import random_state as torch_state
    from mpiring.torch import set_random_state as set_torch_state
    from mpiring.torch.checkpoints import Checkpoints
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False),
                                torch.nn.BatchNorm1d(5))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    lr = torch.optim.lr_scheduler
    schedulers = [lr.MultiStepLR(optimizer, [3, 3, 5]), lr.OneCycleLR(optimizer, 0.1, 10),
                  lr.ReduceLROnPlateau(optimizer)]
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        scaler.scale(model(torch.arange(5)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    wide = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "schedulers": [s.state_dict() for s in schedulers], "scaler": scaler.state_dict(),
            "random": torch_state(),
            "tensors": [wide.t(), wide[:, 1], wide[:0], torch.tensor(3), wide.bfloat16(),
                        wide.to(torch.float8_e4m3fn), wide.to(torch.complex64).conj(),
                        wide.to(torch.complex128), wide > 3, wide.half(), wide.to(torch.uint16)],
            "array": np.arange(3)}
    after = torch.rand(3)
    back = there_and_back(tree, tmp_path, Checkpoints.kinds)
    assert same(back, tree)
    assert back["model"]._metadata == tree["model"]._metadata
    set_torch_state(back["random"])
    assert torch.equal(torch.rand(3), after)
    optimizer.load_state_dict(back["optimizer"])
    for s, state in zip(schedulers, back["schedulers"]):
        s.load_state_dict(state)
    assert list(schedulers[0].milestones.elements()) == [3, 3, 5]


def test_tensors_that_cannot_be_saved_are_named():
    torch = needed("torch")
    from mpiring.torch.checkpoints import Checkpoints
    for bad, problem in ((torch.ones(2).to_sparse(), "layout torch.sparse_coo"),
                         (torch.ones(2, device="meta"), "without data"),
                         (torch.Size([1]), "torch.Size"),
                         (torch.ones(2).to(torch.float8_e4m3fnuz), "is of float8_e4m3fnuz"),
                         (torch.nn.parameter.UninitializedParameter(), "UninitializedParameter")):
        with pytest.raises(ConfigError, match=problem) as caught:
            outline({"x": bad}, Checkpoints.kinds, "own")
        assert str(caught.value).startswith("own['x']")
    with pytest.raises(ConfigError, match="a torch.Tensor"):
        outline({"x": torch.ones(2)}, KINDS, "own")


def test_arrays_on_a_gpu_need_their_adapter(monkeypatch):
    gpu = simulated_gpu.installed(monkeypatch)
    outlined = outline({"x": gpu.put(np.ones(2))}, (Arrays(), DeviceArrays()), "tree")
    with pytest.raises(ConfigError, match="is a gpu_array; load it with the adapter that saved it"):
        rebuild(outlined.text, {}, (Arrays(),))
