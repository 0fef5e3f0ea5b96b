from __future__ import annotations

import numpy as np
import pytest

from mlx_llama.core.files.checkpoint import open_checkpoint


@pytest.fixture(scope="session")
def load(backend):
    """load(folder) -> (model on this test's backend at float32, function from its arrays to
    NumPy).
    """

    def loader(folder):
        return backend.load(open_checkpoint(folder), "float32"), backend.runtime.to_numpy

    return loader


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """Largest absolute error over the largest wanted value."""
    assert got.shape == wanted.shape
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def relative_rms(got: np.ndarray, wanted: np.ndarray) -> float:
    """Root mean square of the errors over that of the wanted values."""
    return float(np.sqrt(np.square(got - wanted).mean() / np.square(wanted).mean()))
