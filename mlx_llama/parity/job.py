"""The checkpoint, tokens and backends of a parity run, from its command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from mlx_llama import cli
from mlx_llama.api.llm import LLM, single_adapter
from mlx_llama.cli import flags
from mlx_llama.core.backends import selection as backends
from mlx_llama.core.errors import BackendError, ContextError, OptionsError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.options import LoadOptions
from mlx_llama.parity import probes as parity

TOKENS = 64
DECODED = 16  # maximum number of tokens that run one by one
STEPS = 24  # greedy tokens to decode
TEXT = (
    "The lighthouse keeper counted the ships that passed in the night, and wrote each one down: "
    "three from the north, two with red sails, and one that carried no light at all. In the "
    "morning he read the list aloud to his cat. "
)


class Job:
    """The parts that all modes share. Raises LlamaError for bad ones before a model is loaded."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.opened = open_backends(args.backends, args.device)
        self.options = flags.load_options(args)
        for backend in self.opened:
            backend.check(self.options)
        self.checkpoint = open_checkpoint(args.model, args.revision, single_adapter(self.options))
        self.config = self.checkpoint.config
        self.made_for = self.config.max_position_embeddings

    def load(self, backend: backends.Backend) -> LLM:
        """Load the model on a backend, with the options of the command line."""
        return self._load(backend, f"{backend.name} ({backend.device_name})", self.options)

    def runs(self) -> Iterator[tuple[LLM, dict[str, Any]]]:
        """(the model, first columns of its rows in a table) on each backend in turn."""
        for backend in self.opened:
            llm = self.load(backend)
            names = {"backend": backend.name, "device": backend.device_name}
            yield llm, names | {"dtype": parity.dtype_of(llm), "tolerance": self.tolerance(llm)}
            parity.free(llm)

    def load_reference(self) -> LLM:
        """Load the float32 NumPy model that the others are compared with."""
        options = LoadOptions(dtype="float32", compile=False)
        return self._load(backends.select("cpu"), "NumPy at float32", options, is_whole=True)

    def _load(
        self, backend: backends.Backend, name: str, options: LoadOptions, is_whole: bool = False
    ) -> LLM:
        cli.say(f"running {self.checkpoint.name} on {name}")
        checkpoint = self.checkpoint
        model = backend.build(checkpoint, backend.check(options), is_whole)
        return LLM(checkpoint, backend, model, checkpoint.template, self.made_for)

    def tokens(self) -> tuple[list[int], int]:
        """(ids, number of the last ones that run one by one). Raises OptionsError, ContextError."""
        args, tokenizer = self.args, self.checkpoint.tokenizer
        count = flags.parse_number("--tokens", args.tokens, 2, self.made_for)
        if args.prompt is not None:
            tokens = tokenizer.encode(args.prompt, add_bos=True)
            if len(tokens) < 2:
                raise ContextError(
                    f"--prompt: {len(tokens)} token is too few, at least 2 are needed: give "
                    "a longer text"
                )
            tokens = tokens[:count]
        else:
            count = count or min(TOKENS, self.made_for)
            text = tokenizer.encode(TEXT, add_bos=True)
            tokens = (text * (count // len(text) + 1))[:count]
        if len(tokens) > self.made_for:
            raise ContextError(
                f"--prompt: {len(tokens)} tokens do not fit the context of {self.made_for}: give "
                "--tokens to run fewer"
            )
        return tokens, min(DECODED, len(tokens) // 2)

    def steps(self, prompt: list[int]) -> int:
        return min(STEPS, self.made_for - len(prompt))

    def tolerance(self, llm: LLM) -> float:
        return parity.tolerance_of(
            parity.dtype_of(llm), bool(self.checkpoint.low_bit), llm.model.cache_bits
        )


def open_backends(names: str | None, device: str | None) -> list[backends.Backend]:
    """The backends of --backends, or all that are installed, on a GPU if there is one. In processes
    of a launcher: the launcher's backend.

    Raises BackendError, OptionsError.
    """
    if names is not None:
        requested = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
        if not requested or not set(requested) <= set(backends.PACKAGES):
            raise OptionsError(
                f"--backends {names!r:.60}: must be some of {', '.join(backends.PACKAGES)}, "
                "with commas"
            )
        if requested == ["cpu"]:
            return [backends.select("cpu", device)]  # refuses a GPU
        return [_open(name, device) for name in requested]
    if backends.world:
        return [_open(backends.world.backend, device)]
    opened = []
    for name in backends.PACKAGES:
        try:
            opened.append(_open(name, device))
        except BackendError as error:
            cli.say(f"({name} is left out: {error})")
    return opened


def _open(name: str, device: str | None) -> backends.Backend:
    """Open a backend. --device does not apply to the cpu backend."""
    if name == "cpu" or device is not None:
        return backends.select(name, None if name == "cpu" else device)
    try:
        return backends.select(name, "gpu")
    except BackendError:
        return backends.select(name, "cpu")
