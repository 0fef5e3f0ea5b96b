"""Steps of requests: launched, maybe before the last step is read, and read in that order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mlx_llama.core.backends.interface import Array, SamplingBatch
from mlx_llama.core.backends.logprobs import unpack
from mlx_llama.core.generation.dry import write_columns

from .device import Device
from .request import Sequence


@dataclass
class Step:
    """A launched step."""

    sequences: list[Sequence]
    # on the device: int32 [B, 1], or [B, C] with log-probabilities, or [1, T] after each draft
    sampled: Array
    drafts: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> Array:
        """The sampled tokens alone, int32 [B, 1] on the device, as the next step's input."""
        return self.sampled if self.sampled.shape[1] == 1 else self.sampled[:, :1]


@dataclass(eq=False)
class Steps(Device):
    """Launches and reads steps of the served model. Raises the errors of the backend."""

    def __post_init__(self) -> None:
        self.launched: list[Step] = []  # not read yet
        # the last step read: its tokens on the device are the input of the same rows' next step
        self._last: Step | None = None
        # options of the last rows that shared a step
        self._batch: tuple[list[Sequence], SamplingBatch] | None = None

    def has_launched(self, sequence: Sequence) -> bool:
        """True if a launched step computes the request's next token."""
        return any(sequence in step.sequences for step in self.launched)

    def rate(self, sequence: Sequence, start: int, end: int) -> None:
        """Compute a chunk of a prompt and wait for the log-probabilities of the tokens after it."""
        count, cache, row = sequence.request.prompt_logprobs or 0, self.cache, sequence.row
        ids = np.array([sequence.tokens[start:end]], np.int32)
        after = np.array([sequence.tokens[start + 1 : end + 1]], np.int32).T
        logits = self.model.forward(ids, cache.lengths[row], cache, rows=[row], all_positions=True)
        packed = sequence.sampling.rate(logits[0], after, count)
        self.backend.launch(packed, *cache.arrays())
        columns = self.backend.runtime.to_numpy(packed).tolist()
        rates = [unpack(numbers, count) for numbers in columns]
        sequence.writer.completion.prompt_logprobs[start + 1 : end + 1] = rates

    def launch(self, sequences: list[Sequence], tokens: Array | None = None) -> None:
        """Launch the next token of each sequence. tokens: int32 [B, T], None for the last ones."""
        if tokens is None:
            if self._last and self._last.sequences == sequences and not self._last.drafts:
                tokens = self._last.tokens
            else:
                tokens = np.array([[sequence.tokens[-1]] for sequence in sequences], np.int32)
        self.launched.append(self._step(sequences, tokens))

    def launch_rest(self, sequence: Sequence) -> None:
        """Launch one step over all tokens that the row lacks."""
        start = self.cache.lengths[sequence.row]
        self.launch([sequence], np.array([sequence.tokens[start:]], np.int32))

    def verify(self, sequence: Sequence, drafts: list[int]) -> None:
        """Launch a step over the last token and drafts of the next ones."""
        tokens, row = np.array([[sequence.tokens[-1], *drafts]], np.int32), sequence.row
        place = self.cache.lengths[row], self.cache
        sampled = self.model.verify(tokens, *place, sequence.sampling, rows=[row])
        self.launched.append(Step([sequence], self._launch(sampled, [sequence.writer]), drafts))

    def read_step(self, step: Step) -> list[int]:
        """Wait for a step's tokens, row by row."""
        sampled = self.read(step.sampled, [sequence.writer for sequence in step.sequences])
        self._last = step
        return sampled

    def forget(self) -> None:
        """Drop all launched steps and the state kept of the last one."""
        self.launched, self._last, self._batch = [], None, None

    def _step(self, sequences: list[Sequence], tokens: Array) -> Step:
        is_masked = any(sequence.needs_token for sequence in sequences)
        masks = (lambda: self._compute_masks(sequences)) if is_masked else None
        rows = [sequence.row for sequence in sequences]
        writers = [sequence.writer for sequence in sequences]
        sampling, cache = self._sampling(sequences), self.cache
        if not (first := sequences[0]).needs_logits:
            return Step(sequences, self.step(tokens, rows, sampling, writers, masks))
        # It is alone, and its caller changes the logits on the host.
        logits = self.model.forward(tokens, cache.lengths[first.row], cache, rows=rows)
        logits = self.backend.runtime.to_numpy(logits)
        first.writer.count_read(logits.nbytes)
        logits = first.request.hooks.process(first.tokens, logits)
        sampled = self.model.sample(logits, cache, sampling, rows=rows, masks=masks)
        self.backend.launch(*cache.arrays())
        return Step(sequences, self._launch(sampled, writers))

    def _compute_masks(self, sequences: list[Sequence]) -> np.ndarray:
        """Allowed tokens and penalties, see Masks. Raises OptionsError for complex grammars."""
        vocabulary = self.model.config.vocab_size
        masks = np.full((len(sequences), -(-vocabulary // 32)), -1, np.int32)
        for row, sequence in enumerate(sequences):
            if sequence.constraint:
                masks[row] = sequence.constraint.mask()
        if any(sequence.dry for sequence in sequences):
            penalties = write_columns([sequence.dry for sequence in sequences], vocabulary)
            masks = np.concatenate([masks, penalties], axis=1)
        return masks

    def _sampling(self, sequences: list[Sequence]) -> SamplingBatch:
        if len(sequences) == 1:
            return sequences[0].sampling
        if not self._batch or self._batch[0] != sequences:
            options = [sequence.options for sequence in sequences]
            self._batch = sequences, self.backend.sampling_batch(options)
        return self._batch[1]


def group(sequences: list[Sequence], runs_ahead: bool) -> list[list[Sequence]]:
    """Split sequences into those that share a step.

    On a device that runs ahead a drafting sequence is alone, and those with a grammar or DRY form a
    group: they wait for their tokens, and the host computes their masks and penalties while the
    device works for the others. A sequence that waits for its logits is alone and comes last.
    """
    if len(sequences) < 2:
        return [sequences] if sequences else []
    waiting = [[sequence] for sequence in sequences if sequence.needs_logits]
    groups = [[sequence for sequence in sequences if not sequence.needs_logits]]
    if runs_ahead:
        drafting = [[sequence] for sequence in groups[0] if sequence.speculation.drafter]
        others = [sequence for sequence in groups[0] if not sequence.speculation.drafter]
        free = [sequence for sequence in others if not sequence.needs_token]
        held = [sequence for sequence in others if sequence.needs_token]
        groups = [free, *drafting, held]
    return [rows for rows in (*groups, *waiting) if rows]
