"""Tests that batches come to a real GPU whole, and are not overwritten while they may be read."""

import cupy_or_host
import numpy as np
import pytest
from launching import needed

from mpiring.data import prefetch

pytestmark = pytest.mark.gpu
COUNT, N = 60, 1 << 20


def batches():
    for number in range(COUNT):
        yield {"x": np.full(N, number, np.float32), "y": (np.arange(5) + number, "text")}


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("own_stream", [False, True])
def test_cupy_arrays(cupy, depth, own_stream):
    stream = cupy.cuda.Stream(non_blocking=True) if own_stream else cupy.cuda.Stream.null
    with stream:
        late = cupy.ones((2000, 2000) if cupy_or_host.REAL else (10, 10), np.float32)
        copies = cupy.zeros((COUNT, N), np.float32)
        for number, batch in enumerate(prefetch(list(batches()), "cuda", depth=depth)):
            # The batch is read only behind this, when the loader has long gone on.
            for _ in range(10):
                late = late @ late * 1e-3
            copies[number] = batch["x"]
            y, text = batch["y"]
            assert text == "text" and y.dtype == np.int64
            if number % 20 == 0:
                assert np.array_equal(y.get(), np.arange(5) + number)
            del batch, y
        stream.synchronize()
    assert np.array_equal(copies.get(), np.repeat(np.arange(COUNT, dtype=np.float32), N
                                                  ).reshape(COUNT, N))


@pytest.mark.parametrize("own_stream", [False, True])
def test_cuda_tensors(own_stream):
    torch = needed("torch")
    if not torch.cuda.is_available():
        pytest.skip(reason="PyTorch finds no GPU")
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    host = [(torch.full((N,), float(number)),
             {"y": torch.arange(number), "flag": torch.tensor(True)}) for number in range(COUNT)]
    with torch.cuda.stream(stream):
        late = torch.ones((2000, 2000), device="cuda")
        copies = torch.zeros((COUNT, N), device="cuda")
        for number, (x, more) in enumerate(prefetch(host, torch.device("cuda"))):
            assert x.is_cuda and more["y"].shape == (number,) and more["flag"].dtype == torch.bool
            for _ in range(10):
                late = late @ late * 1e-3
            copies[number].copy_(x)
            del x, more
        stream.synchronize()
    assert (copies.cpu() == torch.arange(COUNT).float()[:, None]).all()
