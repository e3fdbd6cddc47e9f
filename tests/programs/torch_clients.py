"""Trains with a framework over mpiring and over Gloo, from the same seeds, and compares bit by bit.

On two ranks a sum has one order, so both back ends must return the same bits: every loss, metric,
gradient norm and weight is equal. On more ranks, they are equal to rounding. With a Sharded
optimizer, Accelerate and Lightning return the same to rounding.
"""

import itertools
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mpiring
import mpiring.torch
from mpiring.torch import DataParallel, Sharded

CLIENT, FOLDER = sys.argv[1], Path(sys.argv[2])
# Those of the frameworks are not about us.
warnings.simplefilter("ignore")


def trainer(folder):
    """Hugging Face's Trainer: accumulated and clipped steps, evaluation, a checkpoint, going on."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(1)
    texts = [{"input_ids": text, "labels": text} for text in torch.randint(0, 64, (45, 16))]
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16,
                        bos_token_id=0, eos_token_id=0)
    history = []
    for last, resumed in ((4, None), (6, str(folder / "checkpoint-4"))):
        set_seed(2)
        running = Trainer(
            GPT2LMHeadModel(config),
            TrainingArguments(
                str(folder), seed=3, max_steps=last, lr_scheduler_type="constant",
                per_device_train_batch_size=3, gradient_accumulation_steps=2, max_grad_norm=0.5,
                logging_steps=1, eval_strategy="steps", eval_steps=2, save_steps=4,
                disable_tqdm=True, report_to=[]),
            train_dataset=texts[:32], eval_dataset=texts[32:],
            compute_metrics=lambda end: {"sum": end.predictions.astype("float64").sum()})
        running.train(resume_from_checkpoint=resumed)
        history += [{name: value for name, value in entry.items()
                     if "runtime" not in name and "per_second" not in name}
                    for entry in running.state.log_history]
    assert running.accelerator.num_processes == 2 and running.args.world_size == 2
    assert sum("eval_sum" in entry for entry in history) == 5, history
    # Of each passage, since the second one found the first one's history in its checkpoint.
    assert sum("grad_norm" in entry for entry in history) == 4 + 6, history
    return history, running.model.state_dict()


def accelerate(folder, comm=None):
    """Accelerate: accumulate, clip, gather, gather_for_metrics, reduce, pad, objects, its state.

    With ranks, mpiring averages and updates, and Accelerate prepares the optimizer.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import broadcast, gather_object, set_seed

    AcceleratorState._reset_state(reset_partial_state=True)
    runs = Accelerator(gradient_accumulation_steps=2)
    rank, size = runs.process_index, runs.num_processes
    assert size == 2 and rank == dist.get_rank()
    set_seed(1)
    # The gradient of a bias before BatchNorm is rounding, which AdamW makes as large as any.
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.Tanh(),
        torch.nn.Linear(16, 3))
    if comm is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model = runs.prepare(model)
    else:
        model = DataParallel(model, comm)
        optimizer = Sharded(torch.optim.AdamW, model, lr=0.01)
    x, y = torch.randn(45, 8), torch.randint(0, 3, (45,))
    optimizer, loader, scheduler = runs.prepare(
        optimizer, DataLoader(TensorDataset(x, y), 4, shuffle=True),
        torch.optim.lr_scheduler.StepLR(optimizer, 3))
    seen = []
    for _ in range(2):
        for inputs, labels in loader:
            with runs.accumulate(model):
                loss = F.cross_entropy(model(inputs), labels)
                runs.backward(loss)
                if runs.sync_gradients:
                    seen.append(runs.clip_grad_norm_(model.parameters(), 0.1) if comm is None
                                else optimizer.optimizer.clip_grad_norm_(0.1))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen += [runs.gather(loss), runs.reduce(loss, "mean")]
        right = torch.cat([runs.gather_for_metrics(labels) for _, labels in loader])
        # Without those samples that were given to both ranks, so that batches are full.
        assert sorted(right.tolist()) == sorted(y.tolist())
        seen.append(right)
        runs.save_state(folder)
        runs.wait_for_everyone()
        runs.load_state(folder)
    rows = runs.pad_across_processes(torch.full((rank + 1, 2), float(rank)))
    assert gather_object([rank, "text"]) == [0, "text", 1, "text"]
    assert broadcast(torch.tensor([rank]), 1).tolist() == [1]
    seen.append(runs.gather(rows))
    runs.wait_for_everyone()
    return seen, runs.get_state_dict(model)


def lightning(folder, comm=None):
    """Lightning: logged means, a count that is averaged, validation, all_gather, a checkpoint.

    With ranks, mpiring averages and updates.
    """
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
            if comm is not None:
                self.layers = DataParallel(self.layers, comm)
            self.gathered = []

        def loss_of(self, batch):
            return F.cross_entropy(self.layers(batch[0]), batch[1])

        def training_step(self, batch, _):
            loss = self.loss_of(batch)
            self.gathered.append(self.all_gather(loss.detach()))
            # A mean of an epoch: weighted by a whole number of samples, which is averaged as well.
            self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch, _):
            self.log("valid", self.loss_of(batch), sync_dist=True)
            self.log("samples", float(len(batch[1])), sync_dist=True, reduce_fx="sum")

        def configure_optimizers(self):
            return (torch.optim.AdamW(self.parameters(), lr=0.01) if comm is None else
                    Sharded(torch.optim.AdamW, self.layers, lr=0.01))

        def configure_gradient_clipping(self, optimizer, gradient_clip_val, **algorithm):
            if comm is None:
                super().configure_gradient_clipping(optimizer, gradient_clip_val, **algorithm)
            else:
                optimizer.clip_grad_norm_(gradient_clip_val)

    class Ours(DDPStrategy):
        def configure_ddp(self):
            pass

        def block_backward_sync(self):
            return self.lightning_module.layers.no_sync()

    lightning.seed_everything(1, verbose=False)
    x, y = torch.randn(46, 8), torch.randint(0, 3, (46,))
    module = Module()
    running = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp" if comm is None else Ours(), max_epochs=2,
        gradient_clip_val=0.1, accumulate_grad_batches=2, logger=False, default_root_dir=folder,
        log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False)
    running.fit(module, DataLoader(TensorDataset(x[:32], y[:32]), 4, shuffle=True),
                DataLoader(TensorDataset(x[32:], y[32:]), 4))
    assert running.world_size == 2 and running.global_rank == dist.get_rank()
    assert running.callback_metrics["samples"] == 14
    path = running.strategy.broadcast(running.checkpoint_callback.best_model_path)
    assert Path(path).exists()
    results = module.gathered, dict(running.callback_metrics), module.state_dict()
    if comm is not None:
        again = Module()
        running.fit_loop.max_epochs = 3
        running.fit(again, DataLoader(TensorDataset(x[:32], y[:32]), 4), ckpt_path=path)
        assert running.optimizers[0].state_dict()["state"][0]["step"] == 6
    return results


def deepspeed(folder):
    """DeepSpeed: all stages of ZeRO in two dtypes, accumulated and clipped, a checkpoint."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()))
    import deepspeed

    # DeepSpeed compiles it for inference; neither back end is used there.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    seen = []
    for dtype, stage in itertools.product((torch.float32, torch.bfloat16), range(4)):
        torch.manual_seed(1)
        engines = []
        for _ in range(2):
            model = torch.nn.Sequential(
                torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
            engines.append(deepspeed.initialize(
                model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
                config={"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
                        "gradient_clipping": 0.1, "zero_optimization": {"stage": stage},
                        "bf16": {"enabled": dtype == torch.bfloat16}})[0])
        torch.manual_seed(dist.get_rank())
        place = str(folder / f"{dtype}-{stage}")
        for number in range(8):
            if number == 4:
                engines[0].save_checkpoint(place)
                engines[1].load_checkpoint(place)
            engine = engines[number // 4]
            loss = engine(torch.randn(4, 8, dtype=dtype)).square().mean()
            engine.backward(loss)
            engine.step()
            norm = engine.get_global_grad_norm()        # None before the first step
            seen += [loss.detach(), torch.tensor(float(norm or 0), dtype=dtype)]
        assert engine.global_steps == 4 and engine.zero_optimization_stage() == stage
        for engine in engines:
            engine.destroy()
    return seen


def end_groups():
    """End all groups; DeepSpeed keeps groups of its own, and forgets them only in its call."""
    (sys.modules["deepspeed.comm"] if CLIENT == "deepspeed" else dist).destroy_process_group()


client = {"trainer": trainer, "accelerate": accelerate, "lightning": lightning,
          "deepspeed": deepspeed}[CLIENT]
dist.init_process_group("mpiring", init_method="mpi://")
rank, size = dist.get_rank(), dist.get_world_size()
ours = client(FOLDER / "mpiring")
if CLIENT in {"accelerate", "lightning"}:
    with mpiring.init() as comm:
        sliced = client(FOLDER / "sharded", comm)
        torch.testing.assert_close(sliced, ours, rtol=1e-4, atol=1e-6)
assert dist.get_backend() == "mpiring", "a framework has made a group of its own"
end_groups()

dist.init_process_group("gloo", init_method="mpi://")
theirs = client(FOLDER / "gloo")
end_groups()

torch.testing.assert_close(ours, theirs, **({"rtol": 0, "atol": 0} if size == 2 else {}))
print(f"rank {rank}: {CLIENT} does over mpiring what it does over Gloo", flush=True)
