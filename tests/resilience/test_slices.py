"""Tests that state which was saved in slices comes back whole, to any number of ranks, or not."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from checkpointing import cut, flip, same
from launching import needed
from threads import on_ranks

from mpiring.__main__ import main
from mpiring.errors import CheckpointError, ConfigError
from mpiring.numpy import Checkpoints
from mpiring.resilience import Sliced, load_file, whole

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


def slices(step, rank, size):
    return nest_of(step, lambda x, start: cut_up(x, rank, size, start))


def save(folder, steps, size=3, **options):
    def run(comm):
        with Checkpoints(folder, comm, **options) as checkpoints:
            for step in steps:
                checkpoints.save(step, replicated={"w": np.ones(5)}, own={"rank": comm.rank},
                                 sharded=slices(step, comm.rank, size))
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


def test_what_is_loaded_is_read_where_it_is_taken_and_can_be_saved(tmp_path):
    save(tmp_path / "a", [1])

    def run(comm):
        with Checkpoints(tmp_path / "a", comm) as first, \
                Checkpoints(tmp_path / "b", comm) as second:
            saved = first.load()
            leaf = saved.sharded["state"][4]["m0"]
            assert all(isinstance(piece, np.memmap) and not piece.flags.writeable
                       for piece in leaf.pieces.values())
            assert np.array_equal(leaf.read(300, 700), tensors(1, "float32")["long"][300:700])
            second.save(1, replicated=saved.replicated, sharded=saved.sharded)
    on_ranks(1, run)
    shutil.rmtree(tmp_path / "a")
    assert load(tmp_path / "b") == 1


def test_without_such_state_there_is_none(tmp_path):
    def run(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            loaded = []
            for parts in ({"replicated": 1}, {"sharded": {}}, {"sharded": {"step": 3}}):
                checkpoints.save(1, **parts)
                loaded.append(checkpoints.load().sharded)
            return loaded
    assert on_ranks(2, run) == [[None, {}, {"step": 3}]] * 2


def piece(start, stop, dtype="f4", shape=(4,)):
    return Sliced(shape, {(start, stop): np.ones(stop - start, dtype)}, dtype)


@pytest.mark.parametrize("sharded_of, told", [
    (lambda rank: {"m": piece(0, 3) if rank else piece(2, 4)},
     "elements 2 to 2 of m in sharded are saved by rank 1 and by rank 0; let each rank"),
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
def test_slices_that_do_not_fit_are_told_on_all_ranks(tmp_path, sharded_of, told):
    def run(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            with pytest.raises(ConfigError, match=told) as error:
                checkpoints.save(1, sharded=sharded_of(comm.rank))
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
        assert file.get_tensor("sharded/state/2/m0").shape == (0, 4)
        assert file.get_tensor("sharded/state/3/step") == 5
        tree = dict(json.loads(file.metadata()["mpiring"])["dict"])
        assert tree["step"] == 5


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
    cut(out)
    with pytest.raises(CheckpointError, match="all.safetensors is not a file that was written"):
        load_file(out)
