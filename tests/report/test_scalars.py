"""Scalars for TensorBoard."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from uniap_jax.core.errors import ExecutionError
from uniap_jax.report.scalars import step_scalars, write_scalars, write_scalars_to

METRICS = [{"loss": 4.0}, {"loss": 3.5}]


def test_every_metric_and_both_step_times_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX import proto
    from tensorboardX.record_writer import masked_crc32c

    points = step_scalars(METRICS, seconds=[0.5, 0.25], predicted_step_time_s=0.2, live_bytes=[1e6, 2e6])
    write_scalars(tmp_path, points)
    (file,) = tmp_path.iterdir()
    data, found = file.read_bytes(), {}
    while data:  # TFRecord: length, its checksum, the record, its checksum
        length = int.from_bytes(data[:8], "little")
        assert int.from_bytes(data[8:12], "little") == masked_crc32c(data[:8])
        event = proto.event_pb2.Event.FromString(data[12 : 12 + length])
        found.update({(v.tag, event.step): v.simple_value for v in event.summary.value})
        data = data[16 + length :]
    assert found[("metrics/loss", 2)] == 3.5
    assert found[("step_time_s/measured", 1)] == 0.5
    assert found[("step_time_s/predicted", 2)] == pytest.approx(0.2)
    assert found[("memory_bytes/live", 2)] == pytest.approx(2e6)
    assert len(found) == 8


def test_without_the_extra_the_message_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ExecutionError) as caught:
        write_scalars(tmp_path, step_scalars(METRICS, seconds=[0.5, 0.25], predicted_step_time_s=0.2))
    assert caught.value.package == "tensorboardX"
    assert "uniap-jax[report]" in str(caught.value)


def test_a_writer_of_clus_kind_gets_a_step_at_a_time() -> None:
    class Writer:
        def __init__(self) -> None:
            self.steps: list[tuple[int, dict[str, float]]] = []

        def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
            self.steps.append((step, dict(scalars)))

    writer = Writer()
    write_scalars_to(writer, step_scalars(METRICS, seconds=[0.5, 0.25], predicted_step_time_s=0.2))
    assert writer.steps == [
        (1, {"metrics/loss": 4.0, "step_time_s/measured": 0.5, "step_time_s/predicted": 0.2}),
        (2, {"metrics/loss": 3.5, "step_time_s/measured": 0.25, "step_time_s/predicted": 0.2}),
    ]
