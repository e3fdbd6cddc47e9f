"""Tests that state which was saved in slices comes back whole, to any number of ranks, or not."""

import json
import os
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from launching import needed
from threads import on_ranks

from mpiring.__main__ import main
from mpiring.errors import CheckpointError, ConfigError
from mpiring.numpy import Checkpoints
from mpiring.resilience import Sliced, load_file, whole
from mpiring.resilience.manifest import sealed

SHAPES = {"w": (7, 9), "bias": (3,), "empty": (0, 4), "scalar": (), "long": (1000,)}


def tensors(step, dtype):
    return {name: (np.arange(np.prod(shape, dtype=int)) % 200 + step).astype(dtype).reshape(shape)
            for name, shape in SHAPES.items()}


def cut_up(x, rank, size, start):
    """Return a rank's pieces of a tensor that begins at `start` in a bucket of 1100 elements."""
    end = 1100
    bounds = [r * end // size - start for r in range(size + 1)]
    first, last = (min(max(0, bound), x.size) for bound in bounds[rank:rank + 2])
    middle = (first + last) // 2
    pieces = {(a, b): x.ravel()[a:b].copy() for a, b in ((first, middle), (middle, last))}
    return Sliced(x.shape, pieces, x.dtype)


def nest_of(step, leaf):
    """Return a state like those of PyTorch's optimizers; `leaf(x, start)` makes its leaves."""
    state, start = {}, 0
    first = [tensors(step, dtype) for dtype in ("float32", ml_dtypes.bfloat16, "complex128")]
    for number, name in enumerate(SHAPES):
        state[number] = {f"m{i}": leaf(group[name], start) for i, group in enumerate(first)}
        state[number]["step"] = np.array(step)
        start += first[0][name].size
    return {"state": state, "groups": [{"lr": 1e-3, "params": [*state], "betas": (0.9, 0.99)}]}


def cut(step, rank, size):
    return nest_of(step, lambda x, start: cut_up(x, rank, size, start))


def same(a, b):
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return (type(b), a.dtype, a.shape, a.tobytes()) == (
            np.ndarray, b.dtype, b.shape, b.tobytes())
    return a == b


def save(folder, steps, size=3, **options):
    def run(comm):
        with Checkpoints(folder, comm, **options) as checkpoints:
            for step in steps:
                checkpoints.save(step, replicated={"w": np.ones(5)}, own={"rank": comm.rank},
                                 sharded=cut(step, comm.rank, size))
    on_ranks(size, run)


def load(folder, size=2):
    """Return the step that all ranks load, after a look at what they got."""
    def run(comm):
        with Checkpoints(folder, comm) as checkpoints:
            saved = checkpoints.load()
            assert same(nest_of(saved.step, lambda x, _: x), whole(saved.sharded))
            assert np.array_equal(saved.replicated["w"], np.ones(5))
            return saved.step
    (step,) = set(on_ranks(size, run))
    return step


def newest(folder):
    return folder / (folder / "latest").read_text().strip()


@pytest.mark.parametrize("saved", [1, 2, 3, 5])
def test_any_number_of_ranks_loads_what_any_number_has_saved(tmp_path, saved, caplog):
    save(tmp_path, [3, 5], saved)
    caplog.clear()
    for size in (1, 2, 3, 4):
        assert load(tmp_path, size) == 5
    assert not [record for record in caplog.records if "own state" not in record.message]


def test_each_rank_writes_its_pieces_and_the_manifest_tells_them(tmp_path):
    def run(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            mine = {0: {(0, 60): np.zeros(60)}, 1: {}, 2: {(60, 100): np.ones(40)}}[comm.rank]
            checkpoints.save(1, sharded={"m": Sliced((10, 10), mine, "f8"), "s": np.arange(3)})
    on_ranks(3, run)
    manifest = json.loads((newest(tmp_path) / "manifest.json").read_text())
    assert manifest["slices"] == {
        "m": {"dtype": "float64", "shape": [10, 10], "ranks": {"0:60": 0, "60:100": 2}}}
    files = {name.partition(".")[0]: nbytes for name, nbytes in manifest["files"].items()}
    assert list(files) == ["replicated", "sharded", "slices-00000", "slices-00002"]
    assert 8 * 60 < files["slices-00000"] < 8 * 60 + 300 and files["slices-00002"] < 8 * 40 + 300


def test_a_rank_reads_only_what_it_takes(tmp_path):
    save(tmp_path, [1])

    def run(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            leaf = checkpoints.load().sharded["state"][4]["m0"]
            for piece in leaf.pieces.values():
                assert isinstance(piece, np.memmap) and not piece.flags.writeable
            return leaf.read(300, 700)
    for found in on_ranks(2, run):
        assert np.array_equal(found, tensors(1, "float32")["long"][300:700])


def test_what_is_loaded_can_be_saved(tmp_path):
    save(tmp_path / "a", [1])

    def run(comm):
        with Checkpoints(tmp_path / "a", comm) as first, \
                Checkpoints(tmp_path / "b", comm) as second:
            saved = first.load()
            second.save(1, replicated=saved.replicated, sharded=saved.sharded)
    on_ranks(1, run)
    shutil.rmtree(tmp_path / "a")
    assert load(tmp_path / "b") == 1


def test_slices_that_change_after_save_are_saved_as_they_were(tmp_path):
    def run(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            mine = cut(1, comm.rank, 2)
            checkpoints.save(1, replicated={"w": np.ones(5)}, sharded=mine)
            for state in mine["state"].values():
                for piece in state["m0"].pieces.values():
                    piece[...] = -1
    on_ranks(2, run)
    assert load(tmp_path) == 1


def test_without_such_state_there_is_none(tmp_path):
    def run(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(1, replicated=1)
            checkpoints.wait()
            found = [checkpoints.load().sharded]
            for nest in ({}, {"step": 3}):
                checkpoints.save(2, sharded=nest)
                checkpoints.wait()
                found.append(checkpoints.load().sharded)
            return found
    assert on_ranks(2, run) == [[None, {}, {"step": 3}]] * 2


def test_manifests_of_before_there_were_slices_are_read(tmp_path):
    def of_version_1(manifest):
        manifest["version"] = 1
        del manifest["slices"]

    def run(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(1, replicated=3)
            checkpoints.wait()
            changed(of_version_1)(newest(tmp_path) / "manifest.json")
            saved = checkpoints.load()
            return saved.replicated, saved.sharded
    assert on_ranks(1, run) == [(3, None)]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def half(path):
    os.truncate(path, path.stat().st_size // 2)


def emptied(path):
    os.truncate(path, 0)


def changed(change):
    """Return a harm: change a manifest, which tells a hash of itself."""
    def harm(path):
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(sealed(manifest))
    return harm


def hollow(manifest):
    ranks = manifest["slices"]["state/4/m1"]["ranks"]
    del ranks[list(ranks)[2]]


def doubled(manifest):
    manifest["slices"]["state/4/m1"]["ranks"]["100:105"] = 2


def shorter(manifest):
    manifest["slices"]["state/4/m1"]["shape"] = [1001]


def other(manifest):
    ranks = manifest["slices"]["state/4/m1"]["ranks"]
    ends = list(ranks)[0]
    ranks[ends] = 2


def fewer(manifest):
    manifest["files"] = {name: nbytes for name, nbytes in manifest["files"].items()
                         if not name.startswith("slices-00001")}


@pytest.mark.parametrize("pattern, harm, reason", [
    ("slices-00001.*", flip, "rank 1: slices-00001.* does not have the content that was written"),
    ("slices-00002.*", flip, "rank 0: slices-00002.* does not have the content that was written"),
    ("slices-00001.*", half, r"rank 0: slices-00001.* has \d+ bytes instead of \d+"),
    ("slices-00002.*", emptied, r"rank 0: slices-00002.* has 0 bytes instead of \d+"),
    ("slices-00002.*", os.remove, "rank 0: slices-00002.* is missing"),
    ("sharded.*", flip, "rank 0: sharded.* does not have the content that was written"),
    ("sharded.*", os.remove, "rank 0: sharded.* is missing"),
    ("manifest.json", changed(hollow), r"not whole: elements \d+ to \d+ of state/4/m1 in sharded "
     "are saved by no rank"),
    ("manifest.json", changed(doubled), "not whole: elements 100 to 104 of state/4/m1 in sharded "
     "are saved by rank 0 and by rank 2"),
    ("manifest.json", changed(shorter), "elements 1000 to 1000 of state/4/m1 in sharded are saved "
     "by no rank"),
    ("manifest.json", changed(other), r"rank 2 does not have the elements \d+:\d+ of state/4/m1"),
    ("manifest.json", changed(fewer), "it names no file of rank 1"),
])
def test_what_is_damaged_is_refused_and_the_one_before_taken(
        tmp_path, caplog, pattern, harm, reason):
    save(tmp_path, [5, 10])
    (path,) = newest(tmp_path).glob(pattern)
    harm(path)
    caplog.clear()
    assert load(tmp_path, 2) == 5
    message = caplog.records[0].message
    assert "000002-step-10 is refused: " in message and re.search(reason, message), message


def piece(start, stop, dtype="f4", shape=(4,)):
    return Sliced(shape, {(start, stop): np.ones(stop - start, dtype)}, dtype)


@pytest.mark.parametrize("mine, told", [
    (lambda rank: {"m": piece(0, 3) if rank else piece(2, 4)},
     "elements 2 to 2 of m in sharded are saved by rank 1 and by rank 0; let each rank"),
    (lambda rank: {"m": piece(0, 4)}, "elements 0 to 3 of m in .* by rank 0 and by rank 1"),
    (lambda rank: [piece(rank, rank + 1)], "elements 2 to 3 of 0 in .* saved by no rank"),
    (lambda rank: {"m": piece(2 + rank, 3 + rank)}, "elements 0 to 1 of m in .* by no rank"),
    (lambda rank: {"m": piece(rank, rank + 1, shape=(4, 1)) if rank else piece(2, 4)},
     r"sharded\['m'\] is a sliced of float32 and shape \(4,\) on rank 0, but a sliced of float32 "
     r"and shape \(4, 1\) on rank 1; sharded must be equal on all ranks"),
    (lambda rank: {"m": piece(0, 4, "f8") if rank else piece(2, 4)}, "but a sliced of float64"),
    (lambda rank: {"g": [{"lr": 0.5 + rank}], "m": 1},
     r"\['g'\]\[0\]\['lr'\] is 0.5 on rank 0, but 1.5 on rank 1"),
    (lambda rank: {"x": {}} if rank else {"x": [1]}, r"\['x'\]\[0\] is 1 on rank 0, but missing"),
    (lambda rank: {"x": {}} if rank else {"x": []}, "other dicts and lists on rank 0 than on rank"),
    (lambda rank: None if rank else {}, "rank 0 saves sharded state, but rank 1 does not"),
    (lambda rank: {"m": {1} if rank else 1}, r"rank 1 on .*: sharded\['m'\] is a builtins.set"),
])
def test_slices_that_do_not_fit_are_told_on_all_ranks(tmp_path, mine, told):
    def run(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            with pytest.raises(ConfigError, match=told) as error:
                checkpoints.save(1, sharded=mine(comm.rank))
            checkpoints.save(2, replicated=1)
            return str(error.value)
    assert len(set(on_ranks(2, run))) == 1


def test_slices_belong_into_sharded(tmp_path):
    def run(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            for state in ({"replicated": [piece(0, 4)]}, {"own": [piece(0, 4)]}):
                with pytest.raises(ConfigError, match=rf"{[*state][0]}\[0\]: a Sliced.*sharded="):
                    checkpoints.save(1, **state)
    on_ranks(1, run)


def consolidated(folder, *words):
    out = folder / "all.safetensors"
    assert main(["checkpoint", "consolidate", str(folder), str(out), *words]) == 0
    return out


def test_one_file_is_made_without_the_job(tmp_path, capsys):
    save(tmp_path, [5, 10])
    for words, step in (((), 10), (("--step", "5"), 5)):
        out = consolidated(tmp_path, *words)
        state = load_file(out)
        assert (state["step"], state["size"]) == (step, 3)
        assert same(nest_of(step, lambda x, _: x), state["sharded"])
        assert np.array_equal(state["replicated"]["w"], np.ones(5))
        assert f"step {step}, 15 tensors of the slices of 3 ranks" in capsys.readouterr().out
    flip(next(newest(tmp_path).glob("slices-00000*")))
    assert load_file(consolidated(tmp_path))["step"] == 5


def test_the_package_of_the_format_reads_that_file_by_name(tmp_path):
    safetensors = needed("safetensors")
    save(tmp_path, [5])
    with safetensors.safe_open(consolidated(tmp_path), framework="np") as file:
        assert np.array_equal(file.get_tensor("sharded/state/0/m0"), tensors(5, "f4")["w"])
        assert np.array_equal(file.get_tensor("replicated/w"), np.ones(5))


def test_what_cannot_be_made_into_a_file_is_told(tmp_path, capsys):
    save(tmp_path / "run", [5])
    for folder, out, words, told in (
            ("none", "out", [], "none is not a folder of checkpoints"),
            ("", "out", [], "holds no checkpoint"),
            ("run", "out", ["--step", "6"], "holds no checkpoint of step 6"),
            ("run", "none/out", [], "none/out cannot be written: No such file")):
        arguments = ["checkpoint", "consolidate", f"{tmp_path / folder}", f"{tmp_path / out}"]
        assert main([*arguments, *words]) == 2
        assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "text").write_text("Dear reader, this is not a state of a training.")
    for path, told in ((tmp_path / "text", "was not|is not"), (tmp_path / "none", "is missing"),
                       (next(newest(tmp_path / "run").glob("repl*")), "not written by python -m")):
        with pytest.raises(CheckpointError, match=told):
            load_file(path)
    out = consolidated(tmp_path / "run")
    half(out)
    with pytest.raises(CheckpointError, match="all.safetensors is not a file that was written"):
        load_file(out)


def test_a_plain_optimizer_of_pytorch_goes_on(tmp_path):
    torch = needed("torch")
    from mpiring.memory.tensors import array_of
    from mpiring.torch import Checkpoints, load_file, whole

    def trained(state=None):
        """Return a model and its optimizer, after three steps, or in this state."""
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3).bfloat16())
        optimizer = torch.optim.AdamW(model.parameters())
        if state is not None:
            optimizer.load_state_dict(state)
        for _ in range(0 if state else 3):
            for p in model.parameters():
                p.grad = torch.linspace(-1, 1, p.numel()).view_as(p).to(p.dtype)
            optimizer.step()
        return optimizer.state_dict()

    def cut(x, rank):
        if x.ndim == 0:
            return x
        flat, bounds = array_of(x), [0, x.numel() // 3, x.numel()]
        return Sliced(x.shape, {(a, b): flat[a:b] for a, b in [bounds[rank:rank + 2]]})

    expected = trained()

    def run(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            mine = {"state": {number: {name: cut(x, comm.rank) for name, x in state.items()}
                              for number, state in expected["state"].items()},
                    "param_groups": expected["param_groups"]}
            checkpoints.save(3, sharded=mine)
            checkpoints.wait()
            return whole(checkpoints.load().sharded)
    for found in (*on_ranks(2, run), load_file(consolidated(tmp_path))["sharded"]):
        found = trained(found)
        assert found["param_groups"] == expected["param_groups"]
        for number, state in expected["state"].items():
            for name, x in state.items():
                mine = found["state"][number][name]
                assert mine.dtype == x.dtype and torch.equal(mine, x), name
