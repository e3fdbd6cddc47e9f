"""Tests what `tune` says of algorithms that are used though others win."""

from mpiring.operations.model import Curve, Model
from mpiring.tools.tune import command


def model(**times_us):
    """Return a model of times at 64 B and 4 KiB."""
    return Model(tuple((name, Curve(tuple((size, 1e-6 * us) for size, us in zip((64, 4096), pair))))
                       for name, pair in times_us.items()))


def test_on_one_node_the_calls_of_auto_count():
    """Through the engine `shared` takes 49 times as long as MPI's call; ordinary calls do not."""
    measured = model(shared=(98, 110), native=(2, 20))
    text = "\n".join(command._choices(measured, dict(model(auto=(3, 12)).curves)["auto"]))
    assert text.startswith("auto takes shared from 8 B\nOn one node auto uses shared at every size")
    assert "times as fast" not in text
    text = "\n".join(command._choices(measured, dict(model(auto=(98, 12)).curves)["auto"]))
    assert "native was 49.0 times as fast at 64 B" in text and "MPIRING_ALGORITHM=native" in text


def test_between_nodes_a_slower_algorithm_has_a_reason():
    lines = list(command._choices(model(native=(98, 100), ring=(130, 3900)), None))
    assert lines[:2] == ["auto takes native from 8 B", "auto takes ring from 32 KiB"]
    assert "4 KiB is the largest measured size" in lines[2] and "makes native" in lines[2]
    lines = list(command._choices(model(native=(98, 500), ring=(130, 120)), None))
    assert lines == ["auto takes native from 8 B", "auto takes ring from 128 B"]


def test_the_table(capsys):
    command._print(model(native=(98, 500), ring=(130, 120)), None, "2 ranks on 2 nodes")
    assert capsys.readouterr().out.splitlines()[:5] == [
        "2 ranks on 2 nodes", "", "microseconds        64 B       4 KiB      GB/s",
        "native             98.00*      500.0    0.0100",
        "ring               130.0       120.0*    0.341"]
