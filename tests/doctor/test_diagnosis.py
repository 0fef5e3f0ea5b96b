"""A diagnosis as data."""

from __future__ import annotations

import pytest

from mlx_llama.core.system.machine import format_bytes
from mlx_llama.doctor.diagnosis import Diagnosis


def test_findings_are_one_line_each_and_stand_once():
    diagnosis = Diagnosis({}, [], "cpu", "m")
    diagnosis.add("warning", "weights", "two\nlines")
    diagnosis.add("error", "config", ValueError("two lines"))
    assert [finding.message for finding in diagnosis.findings] == ["two lines"] and diagnosis.ok
    diagnosis.add("error", "config", "another")
    assert not diagnosis.ok


@pytest.mark.parametrize(
    "nbytes, expected",
    [
        (None, "an unknown amount"),
        (0, "0.0 kB"),
        (999_999, "1000.0 kB"),
        (1_000_000, "1.0 MB"),
        (23_456_000_000, "23.5 GB"),
    ],
)
def test_sizes(nbytes, expected):
    assert format_bytes(nbytes) == expected
