"""Sizes in bytes."""

import pytest

from mlx_llama.core.system.machine import parse_size


@pytest.mark.parametrize(
    "text, nbytes",
    [
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 << 29),
        ("1 gib", 1 << 30),
        ("64k", 64_000),
        ("3 B", 3),
        ("0", 0),
        (" 1TiB ", 1 << 40),
        ("", None),
        ("GB", None),
        ("2XB", None),
        ("1e9", None),
        ("2GBs", None),
        ("2iB", None),
        ("2Gi", None),
        ("1.5.5GB", None),
        ("２GB", None),
        ("-1", None),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes
