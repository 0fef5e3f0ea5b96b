"""Common prefixes, against os.path.commonprefix."""

from __future__ import annotations

import os.path

from hypothesis import given, strategies as st

from mlx_llama.core.engine.prefixes import common_prefix

tokens = st.lists(st.integers(0, 2), max_size=8)


@given(tokens, tokens, st.sampled_from([0, 55, 63, 64, 128, 400]))
def test_the_length_is_that_of_the_common_prefix(first, other, count):
    first, other = [7] * count + first, [7] * count + other
    assert common_prefix(first, other) == len(os.path.commonprefix([first, other]))
