"""Runs what the README shows."""

import re
import subprocess
import sys

import pytest
from launching import HANG_S, PROGRAMS, ROOT, WITHOUT_STAND_INS, environment, installed, launch

from mpiring import Config
from mpiring.__main__ import parse

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]

README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def lines():
    return [line for block in blocks("sh") for line in block.splitlines()]


def test_the_first_command_trains():
    """The part behind `pip install … &&`; CI runs the whole of it in a fresh environment."""
    command = blocks("sh")[0].split("&&")[1].split()
    assert command[:4] == ["mpirun", "-n", "4", "python"]
    ended = launch(4, *command[4:])
    assert ended.status == 0, ended.output
    accuracy = float(re.findall(r"test accuracy ([\d.]+)%", ended.output)[-1])
    assert accuracy >= 97


def test_the_diff_is_a_working_program_of_at_most_four_new_lines(tmp_path):
    diff, _ = blocks("diff")
    new = [line for line in diff.splitlines() if line.startswith("+")]
    assert len(new) <= 4
    program = tmp_path / "train.py"
    program.write_text("\n".join([
        "import numpy as np, mpiring",
        "from mpiring.numpy import DataParallel",
        "from mpi4py import MPI",
        "params = {'w': np.full(3, float(MPI.COMM_WORLD.rank)), 'b': np.zeros(())}",
        "learning_rate, batches = 0.5, [MPI.COMM_WORLD.rank] * 3",
        "backward = lambda rank: [('b', rank), ('w', np.arange(3) * rank)]",
        *(line[1:] for line in diff.splitlines() if not line.startswith("-")),
        "assert params['w'].tolist() == [0.0, -1.5, -3.0] and params['b'] == -1.5, params"]))
    ended = launch(3, program)
    assert ended.status == 0, ended.output


def test_the_pytorch_diff_is_a_working_program(tmp_path):
    installed("torch")
    _, diff = blocks("diff")
    program = tmp_path / "train.py"
    program.write_text("\n".join([
        "import torch",
        "from mpi4py import MPI",
        "model = torch.nn.Linear(2, 1)",
        *(line[1:] for line in diff.splitlines() if not line.startswith("-")),
        "model(torch.full((1, 2), float(MPI.COMM_WORLD.rank))).sum().backward()",
        "assert model.module.weight.grad.tolist() == [[0.5, 0.5]]",
        "optimizer.step()"]))
    ended = launch(2, program)
    assert ended.status == 0, ended.output


def test_the_python_block_runs():
    (block,) = [block for block in blocks("python") if "broadcast_object" in block]
    ended = launch(3, "-c", block + "    assert x[0] == 4.5 and names[2] == 'rank 2', x")
    assert ended.status == 0, ended.output
    alone = subprocess.run(
        [sys.executable, "-c", block], cwd=ROOT, env=environment(), timeout=HANG_S)
    assert alone.returncode == 0


def test_mixed_precision_of_numpy_models_works():
    (block,) = [block for block in blocks("python") if "LossScaler" in block]
    ended = launch(3, "-c", "\n".join([
        "import mpiring, numpy as np",
        "comm = mpiring.init()",
        "params = {'w': np.ones(3, np.float16), 'b': np.ones((), np.float32)}",
        "learning_rate, batches = 2.0**-12, [np.float32(comm.rank / 16)] * 100",
        "batches[7] = np.float32(np.inf if comm.rank == 1 else 0)",
        "backward = lambda x, scale: [('b', x * scale), ('w', np.full(3, x * scale))]",
        block,
        "assert params['w'].tolist() == [float(np.float16(1 - 99 / 2**16))] * 3, params",
        "assert params['b'] == masters['w'][0] == 1 - 99 / 2**16, masters['w']",
        "assert scaler.scale == 2**15"]))
    assert ended.status == 0, ended.output


def test_replicas_are_compared_so():
    (block,) = [block for block in blocks("python") if "dp.watch" in block]
    ended = launch(3, "-c", "\n".join([
        "import mpiring, numpy as np",
        "from mpiring.numpy import DataParallel, MasterWeights",
        "comm = mpiring.init()",
        "dp = DataParallel({'w': np.ones(3, np.float16)}, comm)",
        "masters, velocity = MasterWeights(dp), {'w': np.zeros(3)}",
        block,
        "velocity['w'] = np.full(3, 1.0 * (comm.rank == 1))",
        "dp.compare_replicas()"]))
    assert ended.status != 0
    assert re.search(r"after 0 steps, rank 1 on \S+ differs from ranks 0, 2 in velocity\['w'\]",
                     ended.output), ended.output


def test_reducers_are_chosen_so():
    """With codecs that every rank compiles, where numba is installed."""
    (block,) = [block for block in blocks("python") if "mpiring.reducers" in block]
    ended = launch(3, "-c", "\n".join([
        "import mpiring, numpy as np",
        "from mpi4py import MPI",
        "from mpiring.numpy import DataParallel",
        "comm = mpiring.Communicator(MPI.COMM_WORLD, config=mpiring.Config(shared_memory=False))",
        "params = {'embedding': np.zeros((9, 9)), 'w': np.zeros(7), 'bias': np.zeros(3)}",
        block,
        "for name in params: dp.grads[name][...] = comm.rank; dp.ready(name)",
        "dp.wait()",
        "assert (dp.grads['bias'] == 1).all() and abs(dp.grads['w'] - 1).max() < 0.05",
        "assert np.count_nonzero(dp.grads['embedding']) == 1",
        "assert dp.statistics.compression_ratio > 1"]), **WITHOUT_STAND_INS)
    assert ended.status == 0, ended.output


def test_a_training_stops_and_goes_on(tmp_path):
    (block,) = [block for block in blocks("python") if "Stopping" in block]
    program = "\n".join([
        "import mpiring, numpy as np, os, signal",
        "comm = mpiring.init()",
        "w, random = np.zeros(3), np.random.default_rng(comm.rank)",
        block.replace(
            "        step += 1\n",
            "        step += 1\n"
            "        if step == 7 and comm.rank == 1: os.kill(os.getpid(), signal.SIGUSR1)\n"),
        "comm.close()",
        "print('at', step, stopping.reason, flush=True)"]).replace('"run1"', f'"{tmp_path}"')
    for told in ("at 8 SIGUSR1 on rank 1", "at 100 "):
        ended = launch(2, "-c", program)
        assert ended.status == 0 and ended.output.count(told) == 2, ended.output


def test_mixed_precision_of_pytorch_models_works():
    installed("torch")
    (block,) = [block for block in blocks("python") if "GradScaler" in block]
    ended = launch(2, "-c", "\n".join([
        "import mpiring, torch",
        "comm = mpiring.init()",
        "model = torch.nn.Linear(4, 1)",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "batches = [(torch.ones(2, 4), torch.full((2, 1), float(comm.rank))) for _ in range(30)]",
        "batches[3] = batches[3][0] * (torch.inf if comm.rank == 1 else 1), batches[3][1]",
        block,
        "scales = comm.allgather_object(scaler.get_scale())",
        "assert scales == scales[:1] * 2 and scales[0] < 2**16, scales",
        "assert abs(model(torch.ones(1, 4)).item() - 0.5) < 1e-2, model.state_dict()"]))
    assert ended.status == 0, ended.output


def test_the_lab_command_has_real_options():
    (line,) = [line for line in lines() if " lab run " in line and "train.py" in line]
    options = parse(line.split()[3:])
    assert (options.hosts, options.ranks_per_host, options.rate) == (4, 2, "1gbit")
    assert options.traffic and options.command == ["python", "train.py"]


def test_the_bench_commands_have_real_options():
    found = [line.split() for line in lines() if " bench " in line]
    assert {words[words.index("bench") + 1] for words in found} == {
        "allreduce", "latency", "overlap", "steps", "reducers", "codecs", "prefetch"}
    for words in found:
        if "lab" in words:
            words = parse(words[words.index("lab"):]).command
        # parse_args ends the test where a word is no option.
        options = parse(words[words.index("mpiring") + 1:])
        assert getattr(options, "ranks", None) is None or options.ranks >= 1


def test_the_gpu_block_runs(tmp_path):
    """On a simulated GPU."""
    (block,) = [block for block in blocks("python") if "cupy_for" in block]
    program = tmp_path / "program.py"
    program.write_text(block + "    print(dp.params['w'].get(), float(x[0]))\n")
    ended = launch(2, PROGRAMS / "on_simulated_gpu.py", program)
    assert ended.status == 0, ended.output
    assert ended.output.count("[-0.8 -0.8 -0.8] 1.0") == 2, ended.output


def test_the_tuning_command_runs():
    (line,) = [line for line in lines() if line.endswith(" tune")]
    ended = launch(2, *line.split()[4:])
    assert ended.status == 0, ended.output
    assert "auto takes shared" in ended.output and "bucket_bytes" in ended.output
    alone = launch(1, *line.split()[4:])
    assert alone.status == 2 and "start several, as with mpirun" in alone.output, alone.output


def test_the_doctor_commands_have_real_options():
    found = [line.split("mpiring ")[1].split() for line in lines() if " doctor" in line]
    assert found == [["doctor"]] * 3
    assert parse(["doctor"]).deadline == 30, "as the README says"


def test_the_prediction_of_reducers_has_real_options():
    (line,) = [line for line in lines() if " tune --" in line]
    options = parse(line.split()[6:])
    assert (options.model_bytes, options.compute_ms) == (52 << 20, 200)
    assert options.largest_matrix == (512, 2048), "as the README says"


def test_the_simulation_has_real_options():
    found = [line.split() for line in lines() if " simulate " in line]
    first, against = [parse(words[3:]) for words in found]
    assert first.nodes[-1] == 512 and first.ranks_per_node == 8 and first.bandwidth == 12.5e9
    assert first.latency == 2e-6 and first.size == 100_000_000 and first.plot
    assert against.against and against.goodput == 0.956 and against.burst == 128 << 10


def test_the_trace_commands_have_real_options():
    found = [parse(line.split()[3:]) for line in lines()
             if " -m mpiring trace" in line]
    assert len(found) == 2 and found[0].plot == "step.png"
    assert {options.folder for options in found} == {"trace"}
    assert any(line.startswith("MPIRING_TRACE=trace mpirun") for line in lines())


def test_every_setting_is_in_the_table():
    for name, default in vars(Config()).items():
        (row,) = re.findall(rf"^\| `{name}` \| `MPIRING_{name.upper()}` \| (.*) \|$", README,
                            re.MULTILINE)
        shown = str(int(default)) if isinstance(default, bool) else f"{default}"
        assert shown.removesuffix(".0") in row


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_commands_name_real_extras():
    setup = (ROOT / "setup.cfg").read_text()
    for extras in re.findall(r"pip install (?:-e )?'\.\[([^]]+)\]'", README):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} =$", setup, re.MULTILINE), extra
