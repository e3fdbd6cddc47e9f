"""Stops PyTorch trainings, and resumes them on as many ranks and on fewer; run by mpirun -n 3."""

import sys

import torch
from torch import nn

import mpiring
from mpiring.__main__ import main
from mpiring.data import TokenBatches, prefetch
from mpiring.reducers import TopK
from mpiring.torch import (
    DataParallel, DiLoCo, DistributedSampler, Sharded, TrainState, load_file)

FOLDER = sys.argv[1]
# Of a step: 1 to 3 ranks have equal shares of them.
SAMPLES = 12
DICE = torch.Generator().manual_seed(5)
X, Y = (torch.randn(60, n, generator=DICE) for n in (7, 3))


class Net(nn.Module):
    """Gradients become ready in another order than that of the first buckets."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.last, self.first, self.norm = nn.Linear(13, 3), nn.Linear(7, 13), nn.LayerNorm(13)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.last(self.dropout(self.norm(self.first(x))))


class Plain:
    """Dropout, a Reducer that has not sent all, a scheduler, a scaler and a sampler drawn ahead."""

    def __init__(self, comm):
        self.model = DataParallel(Net(0.2), comm, bucket_bytes=300, reducer=TopK(0.1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 6)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64, growth_interval=2)
        self.sampler = DistributedSampler(X, comm, seed=1)
        self.noise = torch.Generator().manual_seed(comm.rank)
        # Each new iteration draws a number, which dropout would miss.
        self.loader = prefetch(torch.utils.data.DataLoader(
            range(len(X)), SAMPLES // comm.size, sampler=self.sampler,
            generator=torch.Generator()), "cpu")
        self.state = TrainState(
            comm, seed=1, model=self.model, optimizer=self.optimizer, schedule=self.schedule,
            scaler=self.scaler, sampler=self.sampler, noise=self.noise)
        torch.manual_seed(comm.rank)

    def step(self, samples):
        x = X[samples] + 0.1 * torch.randn(len(samples), 7, generator=self.noise)
        self.optimizer.zero_grad()
        self.scaler.scale((self.model(x) - Y[samples]).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()

    def next_epoch(self):
        self.sampler.set_epoch(self.sampler.epoch + 1)

    def save(self, step, seen):
        self.state.save(FOLDER, step, seen=seen * SAMPLES // self.state._comm.size)


class InSlices(Plain):
    """A sharded optimizer with groups, and batches of tokens, which are the same on any ranks."""

    def __init__(self, comm):
        self.model = DataParallel(Net(), comm, bucket_bytes=300)
        groups = [{"params": [p for p in self.model.parameters() if (p.dim() > 1) is is_matrix],
                   "weight_decay": 0.1 * is_matrix} for is_matrix in (True, False)]
        self.optimizer = Sharded(torch.optim.AdamW, self.model, groups, lr=0.01, overlap=True)
        self.loader = prefetch(TokenBatches([1] * len(X), comm, tokens=SAMPLES, seed=1), "cpu")
        self.state = TrainState(
            comm, seed=1, model=self.model, optimizer=self.optimizer, batches=self.loader)

    def step(self, samples):
        self.model.weigh(len(samples))
        (self.model(X[samples]) - Y[samples]).square().mean().backward()
        self.optimizer.step()

    def next_epoch(self):
        pass

    def save(self, step, seen):
        self.state.save(FOLDER, step)


class Local(InSlices):
    """Ranks with weights of their own, in the middle of a delay."""

    def __init__(self, comm):
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.outer = DiLoCo(self.model, comm, every=3, delay=1, reducer=TopK(0.1))
        self.loader = prefetch(TokenBatches([1] * len(X), comm, tokens=SAMPLES, seed=1), "cpu")
        self.state = TrainState(
            comm, seed=1, outer=self.outer, batches=self.loader,
            own={"model": self.model, "optimizer": self.optimizer})

    def step(self, samples):
        self.optimizer.zero_grad()
        (self.model(X[samples]) - Y[samples]).square().mean().backward()
        self.optimizer.step()
        self.outer.step()


def train(run, until, save_at=None):
    """Train, and save on the way; return the weights."""
    step = run.state.restore(FOLDER if save_at is None else None)
    assert step == run.state.step == (6 if save_at is None else 0)
    while True:
        for seen, samples in enumerate(run.loader, 1):
            run.step(samples)
            step += 1
            if step == save_at:
                run.save(step, seen)
            if step == until:
                run.state.close()
                return {name: x.clone() for name, x in run.model.state_dict().items()}
        run.next_epoch()


def check(comm, kind):
    """Compare a training that is stopped behind its checkpoint with one that is not."""
    uninterrupted = train(kind(comm), 8, save_at=6)
    same = train(kind(comm), 8)
    torch.testing.assert_close(same, uninterrupted, rtol=0, atol=0)
    if comm.rank == 0:
        print(f"{kind.__name__} resumes bit by bit", flush=True)
    for size in (1, 2) if kind is InSlices else (2,):
        part = comm.split(0 if comm.rank < size else None)
        if part is not None:
            with part:
                again = train(kind(part), 8)
                if kind is InSlices:
                    torch.testing.assert_close(again, uninterrupted, rtol=1e-5, atol=1e-5)


def check_without_slices(comm):
    """Go on from the file of all slices, with PyTorch's own optimizer, on one rank."""
    if comm.rank == 0:
        assert main(["checkpoint", "consolidate", FOLDER, f"{FOLDER}/all.safetensors"]) == 0
        saved, model = load_file(f"{FOLDER}/all.safetensors"), Net()
        model.load_state_dict(saved["replicated"]["model"])
        groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) is is_matrix]}
                  for is_matrix in (True, False)]
        optimizer = torch.optim.AdamW(groups)
        optimizer.load_state_dict(saved["sharded"]["optimizer"])
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert optimizer.state_dict()["state"][0]["step"] == 6
        print("goes on without slices")


config = mpiring.Config(shared_memory=False, tuning=False, algorithm="ring", machine_code=False)
with mpiring.init(config=config) as comm:
    for kind in (Plain, Local, InSlices):
        FOLDER = f"{sys.argv[1]}/{kind.__name__}"
        check(comm, kind)
    check_without_slices(comm)
