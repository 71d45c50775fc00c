"""Scalars for TensorBoard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from uniap_jax.core.errors import ExecutionError
from uniap_jax.report.scalars import write_scalars

METRICS = [{"loss": 4.0}, {"loss": 3.5}]


def test_every_metric_and_both_step_times_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX import proto
    from tensorboardX.record_writer import masked_crc32c

    write_scalars(tmp_path, METRICS, seconds=[0.5, 0.25], predicted_step_time_s=0.2)
    (file,) = tmp_path.iterdir()
    data, points = file.read_bytes(), {}
    while data:  # TFRecord: length, its checksum, the record, its checksum
        length = int.from_bytes(data[:8], "little")
        assert int.from_bytes(data[8:12], "little") == masked_crc32c(data[:8])
        event = proto.event_pb2.Event.FromString(data[12 : 12 + length])
        points.update({(v.tag, event.step): v.simple_value for v in event.summary.value})
        data = data[16 + length :]
    assert points[("metrics/loss", 2)] == 3.5
    assert points[("step_time_s/measured", 1)] == 0.5
    assert points[("step_time_s/predicted", 2)] == pytest.approx(0.2)
    assert len(points) == 6


def test_without_the_extra_the_message_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ExecutionError) as caught:
        write_scalars(tmp_path, METRICS, seconds=[0.5, 0.25], predicted_step_time_s=0.2)
    assert caught.value.package == "tensorboardX"
    assert "uniap-jax[report]" in str(caught.value)
