"""A toy model whose rows depend on their company."""

from __future__ import annotations

import numpy as np
from rows_toy import ToyModel


class Counting(ToyModel):
    """Its last bit depends on the number of rows."""

    def forward(self, tokens, index_pos, cache, **named):
        logits = super().forward(tokens, index_pos, cache, **named)
        return np.nextafter(logits, np.float32(9)) if len(logits) == 3 else logits
