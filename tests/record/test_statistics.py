"""Tests what statistics look like to Prometheus and to TensorBoard."""

import pytest
from launching import needed

from mpiring import Statistics
from mpiring.errors import ConfigError

COSTS = Statistics(5, 1 << 40, 2.0, 0.5, 4096, 0.25, 1e-7, 1 / 3)
EXPECTED = {
    "operations": 5, "sent_bytes": 1 << 40, "communication_seconds": 2, "exposed_seconds": 0.5,
    "dense_bytes": 4096, "encode_seconds": 0.25, "wire_seconds": 1e-7, "decode_seconds": 1 / 3}


@pytest.mark.parametrize("labels", [{}, {"rank": 3}, {"rank": 3, "job": 'a "b"\\\n{c="d"}'}])
def test_prometheus_reads_every_cost_with_its_unit(labels):
    parser = needed("prometheus_client.openmetrics.parser")
    families = [*parser.text_string_to_metric_families(COSTS.openmetrics(**labels))]
    assert {family.name.removeprefix("mpiring_"): family.samples[0].value
            for family in families} == EXPECTED
    for family in families:
        (sample,) = family.samples
        assert family.type == "counter" and family.documentation.endswith(".")
        assert sample.name == f"{family.name}_total"
        assert sample.labels == {name: str(value) for name, value in labels.items()}
        assert family.unit == ("" if family.name == "mpiring_operations"
                               else family.name.rpartition("_")[2])


def test_the_older_text_format_has_the_same_values():
    """It is what the textfile collector of Prometheus's node_exporter reads."""
    parser = needed("prometheus_client.parser")
    samples = [sample for family in parser.text_string_to_metric_families(COSTS.openmetrics(a=1))
               for sample in family.samples]
    assert {sample.name: sample.value for sample in samples} == {
        f"mpiring_{name}_total": value for name, value in EXPECTED.items()}


@pytest.mark.parametrize("parser", ["parser", "openmetrics.parser"])
def test_prometheus_reads_the_reducers(parser):
    parser = needed(f"prometheus_client.{parser}")
    both = Statistics(reducers=("Mean()", "Cast('bfloat16')")) + Statistics(
        reducers=("Mean()", 'My("\\")'))
    assert both.reducers == ("Cast('bfloat16')", "Mean()", 'My("\\")')
    for costs, reducers in ((COSTS, ()), (both, both.reducers), (both - both, both.reducers)):
        # A label that users had to pass earlier does not appear twice.
        text = costs.openmetrics(rank=3, reducer="by hand")
        families = {family.name: family for family in parser.text_string_to_metric_families(text)}
        info = families.pop("mpiring_reducer_info", None)
        assert [(sample.name, sample.value, sample.labels)
                for sample in (info.samples if info else ())] == [
            ("mpiring_reducer_info", 1, {"rank": "3", "reducer": name}) for name in reducers]
        # node_exporter knows no other types.
        assert {family.type for family in (*families.values(), info) if family} <= {
            "counter", "gauge", "unknown"}
    assert both == Statistics(), "Reducers are no costs"


@pytest.mark.parametrize("name", ["two words", "é", "1st", "__name__", ""])
def test_a_label_that_prometheus_refuses_is_an_error(name):
    with pytest.raises(ConfigError, match=f"label '{name}': expected ASCII letters"):
        COSTS.openmetrics(**{name: 1})


@pytest.mark.parametrize(("costs", "words"), [
    (COSTS, "sent 1024.0 GiB; compressing took"),
    (COSTS + Statistics(dense_bytes=1 << 42), "sent 1024.0 GiB, which would be 4096.0 GiB without"),
    (Statistics(3, 0, 1.0), "sent 0 B over networks: on one node, data is in shared memory"),
    (Statistics(3, 0, 1.0, dense_bytes=64), "one node, data is in shared memory")])
def test_a_sentence_says_why_nothing_was_sent(costs, words):
    assert words in str(costs)


def test_a_writer_gets_every_cost_of_a_step():
    class Writer:
        def __init__(self):
            self.scalars = {}

        def add_scalar(self, tag, value, global_step=None):
            assert global_step == 7
            self.scalars[tag.removeprefix("mpiring/")] = value

    writer = Writer()
    COSTS.add_scalars(writer, 7)
    assert writer.scalars == {**EXPECTED, "hidden_share": 0.75}
