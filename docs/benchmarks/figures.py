"""Lists the figures: the results that each shows, its picture, and its table."""

from dataclasses import dataclass
from pathlib import Path

import drawn
import tabulated
from measured import HERE, allreduces


@dataclass(frozen=True)
class Figure:
    """A picture and a table.

    Attributes:
        name: Name of the picture, and of the comments on the page.
        page: File name of the page; "" for a picture alone.
        results: Names of files in the folder data, without .json.
        alt: Description of the picture.
        table: Function of the results that returns the lines of the table.
        draw: Function of a path and the results that writes the picture; None for a table alone.
        folder: Folder of the picture.
        commands: If true, commands, machine and data are named below the table.
    """

    name: str
    page: str
    results: tuple
    alt: str
    table: object
    draw: object
    folder: Path = HERE / "pictures"
    commands: bool = True

    @property
    def picture(self):
        """The path of the picture."""
        return self.folder / f"{self.name}.svg"


def _figure(page, name, results, alt, table, draw):
    return Figure(name, f"{page}.md", tuple(results.split()), alt, table, draw)


_SHORTER, _LONGER = "; shorter is better", "; longer is better"
_TRAINING = f"training step / compute alone{_SHORTER}"
_OF_BOUND = ("training step / max(compute, time of the bytes on a link) (dashed: 1)\n"
             "shorter is better")
FIGURES = [
    Figure("speed", "", ("steps_2", "allreduce_2"), "", None, drawn.speed,
           HERE.parent / "pictures"),
    Figure("in_short", "", ("steps_2", "steps_hosts_2"), "", None, drawn.in_short,
           HERE.parent / "pictures"),
    Figure("readme", "../../README.md", ("steps_2", "steps_hosts_2", "allreduce_2"), "",
           tabulated.headlines, None, commands=False),

    *(_figure("allreduce", f"allreduce_{ranks}_{buffer}", f"allreduce_{ranks}",
              f"Time and bandwidth over size, {ranks} ranks, {words}",
              tabulated.allreduces_on_node(buffer), drawn.plotted(allreduces(buffer)))
      for ranks in (2, 4)
      for buffer, words in (("empty", "comm.empty"), ("private", "private memory"))),
    _figure("allreduce", "allreduce_libraries",
            "allreduce_2 allreduce_openmpi_2 allreduce_intelmpi_2", "",
            tabulated.allreduces_of_libraries, None),
    *(_figure("allreduce", f"allreduce_horovod_{ranks}", f"allreduce_horovod_{ranks}",
              f"Time and bandwidth over size, with Horovod, {ranks} ranks",
              tabulated.allreduces_on_node("empty"), drawn.plotted(allreduces("empty")))
      for ranks in (2, 4)),

    *(_figure("short_calls", f"latency_{ranks}_{buffer}", f"latency_{ranks}",
              f"Time of short calls over size, {ranks} ranks, {words}",
              tabulated.latency_table(buffer), drawn.short_calls(buffer))
      for ranks, buffer, words in ((2, "private", "private memory"), (2, "empty", "comm.empty"),
                                   (4, "private", "private memory"))),

    _figure("../how_to/which_algorithm", "numba", "latency_numpy_2 latency_numba_2", "",
            tabulated.with_and_without, None),

    *(_figure("between_hosts", name, results, alt, tabulated.of_limit_table, drawn.barred(
        drawn.of_limit, "allreduce of 16 MiB; hosts × ranks; links of 1 Gbit/s",
        f"time / what the bytes need on the links (dashed: 1){_SHORTER}",
        1))
      for name, results, alt in (
          ("hosts", "hosts_3 hosts_4 hosts_4x2 hosts_4x2_dealt",
           "Allreduce between hosts over the limit of the links"),
          ("hosts_horovod", "hosts_4_horovod",
           "Allreduce between hosts over the limit of the links, with Horovod"))),

    _figure("training_steps", "steps_node", "steps_2", "Training steps on one node over compute",
            tabulated.step_table("step, ms", "/ compute", "/ Gloo", "extra, MiB"),
            drawn.barred(drawn.steps(), "transformer of 12.9 M parameters, 2 ranks on one node",
                         _TRAINING)),
    _figure("training_steps", "steps_models", "steps_models_2",
            "Training steps of three models over compute", tabulated.models, drawn.models),
    _figure("training_steps", "steps_hosts", "steps_hosts_2",
            "Training steps between two hosts over the bound",
            tabulated.step_table("step, ms", "/ compute", "/ bound", "/ Gloo", "hidden, %",
                                 "extra, MiB"),
            drawn.barred(drawn.steps("over_bound"),
                         "transformer of 12.9 M parameters, 2 hosts, 1 Gbit/s",
                         _OF_BOUND, 1)),

    _figure("overlap", "overlap", "overlap_hosts_2", "Share of hidden communication",
            tabulated.overlap, drawn.plotted()),

    _figure("sixteen_bits", "sixteen_node", "sixteen_2",
            "Time of 16-bit numbers over float32 on one node", tabulated.sixteen_bits,
            drawn.barred(drawn.sixteen_bits, "allreduce by 2 ranks on one node, comm.empty",
                         f"time / that of as many numbers in float32 (dashed: 1){_SHORTER}", 1)),
    _figure("sixteen_bits", "sixteen_hosts", "sixteen_hosts_4",
            "Time of 16-bit numbers over float32 between hosts", tabulated.sixteen_bits,
            drawn.barred(drawn.sixteen_bits, "allreduce by 4 hosts, links of 1 Gbit/s",
                         "time / that of as many numbers in float32 (dashed: half of it)"
                         f"{_SHORTER}", 0.5)),

    *(_figure("reducers", name, results, f"Training steps with each Reducer{words}",
              tabulated.reducers, drawn.barred(
                  drawn.reducers, f"transformer of 12.9 M parameters, {where}",
                  f"training step / compute alone, median over seeds{_SHORTER}"))
      for name, results, words, where in (
          ("reducers", "reducers_hosts_2", "", "2 hosts, 1 Gbit/s"),
          ("reducers_slow", "reducers_slow", " at 100 Mbit/s", "4 hosts, 100 Mbit/s"))),
    _figure("reducers", "codecs", "codecs", "Numbers encoded per second",
            tabulated.codecs, drawn.barred(drawn.codecs, "one core, 4 M numbers",
                                           f"1e9 numbers encoded per second{_LONGER}")),

    _figure("local_training", "local_slow_network", "local_slow_network",
            "Loss against seconds and against bytes", tabulated.local_times, drawn.plotted()),
    _figure("local_training", "local_streaming", "local_streaming", "", tabulated.local_times,
            None),
    _figure("local_training", "local_losses", "local_losses", "Losses after 40 steps",
            tabulated.local_losses, drawn.barred(
                drawn.local_losses, "transformer of 0.87 M parameters, 4 ranks, three seeds",
                f"bits per byte after 40 steps{_SHORTER}")),
    _figure("local_training", "stragglers", "local_awake local_asleep",
            "Samples per second with delayed ranks", tabulated.stragglers, drawn.barred(
                drawn.stragglers, "4 ranks, each asleep in a quarter of its steps",
                f"samples per second{_LONGER}")),

    _figure("sharded", "sharded_node", "sharded_2",
            "Sharded training steps on one node over compute",
            tabulated.sharded, drawn.barred(
                drawn.steps(), "transformer of 12.9 M parameters, AdamW, 2 ranks on one node",
                _TRAINING)),
    _figure("sharded", "sharded_hosts", "sharded_hosts_2",
            "Sharded training steps between two hosts over the bound", tabulated.sharded,
            drawn.barred(
                drawn.steps("over_bound"),
                "transformer of 12.9 M parameters, AdamW, 2 hosts, 1 Gbit/s",
                _OF_BOUND, 1)),
    _figure("sharded", "updates", "updates", "Rates of the optimizers",
            tabulated.updates, drawn.barred(drawn.updates, "one core, 16 M numbers",
                                            f"rate / that of a copy (dashed: 1){_LONGER}", 1)),

    _figure("unequal_lengths", "batches", "batches", "Tokens per second, padding and idle time",
            tabulated.batches, drawn.plotted()),
    _figure("prefetch", "prefetch", "prefetch prefetch_switch",
            "Training steps with loaded data over steps with data in memory", tabulated.prefetch,
            drawn.barred(drawn.prefetch, "1 rank with 1 thread; a loader of 0.8 of a step",
                         f"step / step on data in memory (dashed: 1){_SHORTER}", 1)),
    *(_figure("gpus", name, results, "", tabulated.allreduces_on_gpu, None) for name, results in (
        ("gpu_allreduce", "gpu_allreduce_2 gpu_allreduce_4"),
        ("gpu_allreduce_mps", "gpu_allreduce_2_mps"), ("gpu_short", "gpu_short_2"))),
    _figure("gpus", "gpu_short_mps", "gpu_short_2_mps",
            "Time and bandwidth over size on a GPU, 2 ranks under MPS, comm.empty",
            tabulated.allreduces_on_gpu, drawn.plotted(allreduces("empty"))),
    *(_figure("gpus", f"gpu_steps{under}", f"gpu_steps_2{under}",
              f"Training steps on a GPU over compute{words}",
              tabulated.step_table("step, ms", "/ compute", "/ Gloo", "hidden, %"), draw)
      for under, words, draw in (("", "", None), ("_mps", ", under MPS", drawn.barred(
          drawn.steps(), "transformer of 51.0 M parameters, 2 ranks on one NVIDIA H100, MPS",
          _TRAINING)))),
    _figure("gpus", "gpu_codecs", "gpu_codecs", "", tabulated.codecs, None),
    _figure("gpus", "gpu_prefetch", "gpu_prefetch", "", tabulated.prefetch_on_gpu, None),
    _figure("memory", "memory", "memory_shared_2 memory_shared_4 memory_ring_2 memory_ring_4 "
            "memory_direct_4 memory_hierarchical",
            "Memory for the communication of gradients", tabulated.memory, drawn.barred(
                drawn.memory, "buckets of 18 MiB; hosts × ranks",
                f"MiB beyond the gradients{_SHORTER}")),
    _figure("scaling", "scaling", "simulate", "Predicted time and efficiency over nodes",
            tabulated.scaling, drawn.plotted()),
    _figure("scaling", "predictions", "measured_3 predictions",
            "Predicted over measured times", tabulated.predictions, drawn.barred(
                drawn.predictions, "allreduce between 3 hosts, links of 1 Gbit/s",
                "predicted / measured (dashed: 1, an exact prediction)", 1)),
    _figure("scaling", "steps_predicted", "steps_against_node steps_against_1gbit "
            "steps_against_100mbit", "Predicted over measured training steps",
            tabulated.predicted_steps, drawn.barred(
                drawn.predicted_steps, "transformer of 12.9 M parameters, AdamW; hosts × ranks",
                "predicted / measured (dashed: 1, an exact prediction)", 1)),
    _figure("scaling", "steps_scaling", "steps_scaling", "Training steps and efficiency over nodes",
            tabulated.scaled_steps, drawn.scaled_steps),
    _figure("clusters", "clusters", "clusters", "", tabulated.clusters, None),
    Figure("clusters_published", "clusters.md", ("clusters",), "", tabulated.clusters_published,
           None, commands=False),
    _figure("large_batches", "large_batches", "large_batches_digits large_batches_bytes",
            "Best scores over the batch", tabulated.large_batches, drawn.large_batches),
]
