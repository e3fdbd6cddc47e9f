"""Trains with every Reducer through PyTorch's adapter, each rank a node; run by mpirun.

On the CPU, or on a GPU; see whereabouts.
"""

import shutil
import tempfile

import torch
from mpi4py import MPI
from torch import nn
from whereabouts import CUDA, WHERE, without_compiling

import mpiring
from mpiring.reducers import Adasum, Cast, ErrorFeedback, Int8, OneBit, PowerSGD, TopK
from mpiring.torch import Checkpoints, DataParallel

without_compiling()
if CUDA:
    torch.set_default_device(WHERE)
MAKERS = {
    "cast": lambda: Cast("float16"),
    "int8": lambda: ErrorFeedback(Int8(64)),
    "onebit": lambda: OneBit(64, warmup_steps=2),
    "topk": lambda: TopK(0.05),
    "powersgd": lambda: PowerSGD(2, start_step=1),
    "mixed": lambda: {"0.weight": PowerSGD(1, start_step=0), "*.weight": Int8(64)},
}
comm = mpiring.Communicator(
    MPI.COMM_WORLD, config=mpiring.Config(shared_memory=False, tuning=False))
FOLDER = comm.broadcast_object(tempfile.mkdtemp())


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(),
                         nn.Linear(40, 2))


def batch(step):
    dice = torch.Generator("cpu").manual_seed(100 * step + comm.rank)
    x = torch.randn(16, 20, generator=dice, device="cpu").to(WHERE)
    return x, x[:, :2] - x[:, 2:4]


class Run:
    """A model in training, and what it needs to go on."""

    def __init__(self, make, state=None):
        self.reducer, self.step = make(), 0
        self.each = list(self.reducer.values()) if isinstance(self.reducer, dict) else [
            self.reducer]
        bare = net()
        if state:
            bare.load_state_dict(state["model"])
            for reducer, kept in zip(self.each, state["reducers"]):
                reducer.load_state_dict(kept)
        self.model = DataParallel(bare, comm, bucket_bytes=4000, reducer=self.reducer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.scaler = torch.amp.GradScaler(WHERE.type, init_scale=64, growth_interval=5)
        if state:
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
            self.step = state["step"]

    def state(self):
        """Return what a checkpoint brings back: tensors are on the CPU."""
        with Checkpoints(FOLDER, comm) as checkpoints:
            checkpoints.save(self.step, replicated={
                "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(), "step": self.step,
            }, own={"reducers": [reducer.state_dict() for reducer in self.each]})
            saved = checkpoints.load()
        assert all(x.device.type == "cpu" for x in saved.replicated["model"].values())
        return {**saved.replicated, **saved.own}

    def train(self, steps, spoil_at=None, weigh=lambda model, step, loss: loss):
        for _ in range(steps):
            x, y = batch(self.step)
            self.step += 1
            if self.step == spoil_at and comm.rank == comm.size - 1:
                x[0, 0] = torch.nan
            self.optimizer.zero_grad()
            loss = weigh(self.model, self.step, (self.model(x) - y).square().mean())
            self.scaler.scale(loss).backward()
            assert self.model.finite == (self.step != spoil_at)
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.model.rescale(self.scaler.get_scale() / before)

    def loss(self):
        with torch.no_grad():
            x, y = batch(0)
            return (self.model(x) - y).square().mean().item()

    def weights(self):
        return b"".join(p.detach().cpu().numpy().tobytes() for p in self.model.parameters())


def replicas_learn_and_skip_a_nan_of_one_rank(name, make):
    run = Run(make)
    first = run.loss()
    run.train(4)
    before = run.weights()
    run.train(1, spoil_at=5)
    assert run.weights() == before, "the step was taken"
    run.train(12)
    assert run.loss() < 0.9 * first, f"{name} does not learn"
    assert len(set(comm.allgather_object(run.weights()))) == 1
    assert comm.size == 1 or name == "adasum" or run.model.statistics.compression_ratio > 1.4


def a_run_goes_on_bit_by_bit(name, make):
    run = Run(make)
    run.train(4)
    resumed = Run(make, run.state())
    run.train(4)
    resumed.train(4)
    assert run.weights() == resumed.weights()


def frozen_layers_come_back(name, make):
    run = Run(make)
    run.train(3)
    for frozen in (True, False):
        run.model.module[2].requires_grad_(not frozen)
        run.train(3)
        assert len(set(comm.allgather_object(run.weights()))) == 1


def tokens_are_weighed_before_they_are_compressed(name, make):
    """In turn, one rank has all tokens; factors are powers of two, which rounds nothing."""
    def weigh(model, step, loss):
        has = step % comm.size == comm.rank
        model.weigh(7 * has)
        return loss if has else loss * torch.nan

    weighed, scaled = Run(make), Run(make)
    weighed.train(6, weigh=weigh)
    scaled.train(6, weigh=lambda model, step, loss: loss * comm.size * (
        step % comm.size == comm.rank))
    assert weighed.weights() == scaled.weights()


def a_nan_in_a_sparse_gradient_is_skipped_too(name, make):
    if name == "mixed":
        return
    torch.manual_seed(0)
    reducer, bare = make(), nn.Sequential(nn.Embedding(9, 40, sparse=True), nn.Linear(40, 40))
    model, kept = DataParallel(bare, comm, reducer=reducer), []
    for bad in (False, True):
        spoils = bad and comm.rank == comm.size - 1
        hook = bare[0].weight.register_hook(lambda g: g * (torch.nan if spoils else 1))
        model(torch.arange(3)).sum().backward()
        hook.remove()
        assert model.nonfinite == ({comm.size - 1: ["0.weight"]} if bad else {})
        assert model.finite != bad and bare[1].weight.grad.isfinite().all()
        bare[0].weight.grad = None
        tensors = reducer.state_dict()["tensors"]
        assert {tensor["steps"] for tensor in tensors.values()} == {1}, "the step counted"
        kept.append({(tensor, piece["start"], name): x.tobytes()
                     for tensor, state in tensors.items() for piece in state["pieces"]
                     for name, x in piece["vectors"].items()})
    # (A vector of zeros may have come to be.)
    assert kept[0].items() <= kept[1].items(), "the step counted"


# Which has no state, and compresses nothing.
replicas_learn_and_skip_a_nan_of_one_rank("adasum", Adasum)
for test in (replicas_learn_and_skip_a_nan_of_one_rank, a_nan_in_a_sparse_gradient_is_skipped_too,
             a_run_goes_on_bit_by_bit, frozen_layers_come_back,
             tokens_are_weighed_before_they_are_compressed):
    for name, make in MAKERS.items():
        test(name, make)
    if comm.rank == 0:
        print(f"holds: {test.__name__}", flush=True)
if comm.rank == 0:
    shutil.rmtree(FOLDER)
comm.close()
print("all is well", flush=True)
