"""Saves and loads checkpoints on ranks that are threads, and changes files in them."""

import json
import os

import numpy as np
from threads import on_ranks

from mpiring.numpy import Checkpoints
from mpiring.resilience import Sliced
from mpiring.resilience.manifest import sealed


def state(step, rank=None):
    """Return a state that contains its step and its rank."""
    x = np.arange(100.0) + step
    return {"x": x} if rank is None else {"rank": rank, "x": x + 1000 * rank}


def parts(step, comm):
    """Return what a rank saves, including slices of 100 elements."""
    ends = 100 * comm.rank // comm.size, 100 * (comm.rank + 1) // comm.size
    own_slice = Sliced((100,), {ends: state(step)["x"][slice(*ends)]}, np.float64)
    return {"replicated": state(step), "own": state(step, comm.rank), "sharded": {"m": own_slice}}


def save(folder, *steps, size=2, **options):
    """Save some steps, one after the other."""
    def run(comm):
        with Checkpoints(folder, comm, **options) as checkpoints:
            for step in steps:
                checkpoints.save(step, **parts(step, comm))
    on_ranks(size, run)


def load(folder, size=2, **options):
    """Return what each rank loads, after a check of its content."""
    def run(comm):
        with Checkpoints(folder, comm, **options) as checkpoints:
            saved = checkpoints.load()
            if saved is not None:
                assert np.array_equal(saved.replicated["x"], state(saved.step)["x"])
                if saved.own is not None:
                    assert saved.own["rank"] == comm.rank
                    assert np.array_equal(saved.own["x"], state(saved.step, comm.rank)["x"])
                if saved.sharded is not None:
                    assert np.array_equal(saved.sharded["m"].whole(), state(saved.step)["x"])
        return saved
    return on_ranks(size, run)


def same(a, b):
    """Return whether two trees are equal in types, order of keys, dtypes, shapes and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and [type(k) for k in a] == [type(k) for k in b] and all(
            same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if type(a).__module__ == "torch":
        import torch
        bits = [x.resolve_conj().contiguous().view(-1).view(torch.uint8) for x in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
    return a == b or a != a and b != b


def names(folder):
    """Return the names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def flip(path):
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path):
    """Truncate a file to its first half."""
    os.truncate(path, path.stat().st_size // 2)


def as_pipe(path):
    """Replace a file by a pipe."""
    path.unlink()
    os.mkfifo(path)


def changed(change):
    """Return a function that changes a manifest, which contains its own hash."""
    def harm(path):
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(sealed(manifest))
    return harm
