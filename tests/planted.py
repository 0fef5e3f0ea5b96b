"""Plant faults in a copy of this tree, one at a time, and list those that the tests miss.

    python tests/planted.py                              # all faults, the tests of each touched area
    python tests/planted.py --all --jobs 4               # the slow tests too
    python tests/planted.py --area sampling              # or --only 3,17; --list prints the numbers
    python tests/planted.py --only 11 tests/backends/test_cache.py    # these tests in place of the table's
    python tests/planted.py --check                      # the texts of the faults alone; runs no tests

The tests must pass without a fault. Exits with 1 if a fault is unseen, or if a run of the tests
broke.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import py_compile
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from platformdirs import user_cache_path

ROOT = Path(__file__).resolve().parents[1]
AREAS = (
    "forward",
    "cache and rows",
    "scheduler",
    "sampling",
    "files and formats",
    "text",
    "server",
    "commands and REPL",
)
PER_AREA = 10


class Fault(NamedTuple):
    """A wrong change of a file."""

    area: str
    file: str
    old: str  # occurs once in `file`, whatever the layout of its lines
    new: str
    says: str  # the effect

    @property
    def pattern(self) -> re.Pattern[str]:
        """`old` with any white space between its tokens, and with the trailing commas of a
        formatter.
        """
        text = self.old.strip()
        before, after = self.old.split(text)
        tokens = re.findall(r"\w+|[^\w\s]", text)
        spaced = [re.escape(tokens[0])]
        for last, token in itertools.pairwise(tokens):
            gap = (
                r"\s+"
                if last.isidentifier() and token.isidentifier()
                else r",?\s*"
                if token in ")]}"
                else r"\s*"
            )
            spaced.append(gap + re.escape(token))
        return re.compile(re.escape(before) + "".join(spaced) + re.escape(after))

    def plant(self, text: str) -> str:
        return self.pattern.sub(lambda _: self.new, text)


FAULTS = [
    Fault(
        "forward",
        "mlx_llama/core/backends/positions.py",
        "max(0, window.first(self.start)) if window else 0",
        "max(0, window.first(self.start - 1)) if window else 0",
        "with a sliding window a decoded token sees one position too many",
    ),
    Fault(
        "forward",
        "mlx_llama/core/models/rope.py",
        "seq_len > rope.original_max_position_embeddings",
        "seq_len >= rope.original_max_position_embeddings",
        "longrope takes the long table for a context of exactly the trained length",
    ),
    Fault(
        "forward",
        "cpu_fallback/ops.py",
        "    if cap:\n        scores = softcap(scores, cap)\n"
        "    if mask is not None:\n        scores[..., ~mask] = -np.inf\n",
        "    if mask is not None:\n        scores[..., ~mask] = -np.inf\n"
        "    if cap:\n        scores = softcap(scores, cap)\n",
        "NumPy: the softcap comes after the mask, so hidden positions get a share",
    ),
    Fault(
        "forward",
        "cpu_fallback/kernels/operations.py",
        "count = (tokens + (full - 1 - largest)) // full",
        "count = (tokens + (full - largest)) // full",
        "compiled products: a rest of as many tokens as the largest small tile holds is read "
        "as a full tile",
    ),
    Fault(
        "forward",
        "cpu_fallback/kernels/runner.py",
        "self._words[_FIRST_ROW] = 0\n        self.embed(ids)",
        "self.embed(ids)",
        "compiled programs: after logits of over 48 positions the next call begins at a later row",
    ),
    Fault(
        "forward",
        "mlx_llama/mlx_native/kernels/view.py",
        "visible & (columns >= window.first(position))",
        "visible & (columns >= window.first(position - 1))",
        "MLX's step over a buffer sees one position too many with a sliding window",
    ),
    Fault(
        "forward",
        "mlx_llama/mlx_native/ops.py",
        "mx.arange(L) <= mx.arange(L - T, L)[:, None]",
        "mx.arange(L) <= mx.arange(T)[:, None]",
        "MLX: with a softcap or an 8-bit cache a later chunk of a prompt sees the text's "
        "beginning alone",
    ),
    Fault(
        "forward",
        "mlx_llama/mlx_native/kernels/two_level.py",
        "code |= words[(at / 32 + 1) % BITS] << (32 - shift)",
        "code |= words[at / 32] << (32 - shift)",
        "Metal's kernels: a code of 3, 5 or 6 bits that lies in two words takes its upper bits "
        "from the first",
    ),
    Fault(
        "forward",
        "cuda_fallback/ops.py",
        "~mask[first:first + 256]",
        "~mask[:own.shape[2]]",
        "torch: with a softcap and a window, queries from the 257th on have the mask of the first",
    ),
    Fault(
        "forward",
        "cuda_fallback/kernels/products.py",
        "up += tl.load(bias + N + n, mask",
        "up += tl.load(bias + n, mask",
        "Triton's gated product adds the gate's bias to up as well",
    ),
    Fault(
        "cache and rows",
        "cpu_fallback/cache.py",
        "if len(tokens) == 1 and page.holders == 1:",
        "if len(tokens) == 1:",
        "a decoded token is written to a page that another row shares",
    ),
    Fault(
        "cache and rows",
        "cpu_fallback/pages.py",
        "self.scales[:, :, :, :count] = other.scales[:, :, :, :count]\n        self.tokens",
        "self.tokens",
        "cpu, 8-bit cache: the copy of a page lacks its scales",
    ),
    Fault(
        "cache and rows",
        "cpu_fallback/kernels/paging.py",
        "if d + LANES <= head_dim:",
        "if d < head_dim:",
        "compiled kernels, 8 or 16 bits: a head whose size is no multiple of 16 takes in the "
        "next head's numbers",
    ),
    Fault(
        "cache and rows",
        "mlx_llama/core/engine/rows.py",
        "if self.cache.adapters[row] != adapter:",
        "if self.cache.adapters[row] not in (adapter, 0):",
        "an adapter's request reuses a prefix that was computed without it",
    ),
    Fault(
        "cache and rows",
        "mlx_llama/core/engine/rows.py",
        "if self.nbytes + grown <= self.budget",
        "if grown <= self.budget",
        "the budget of the cache does not count what is taken already",
    ),
    Fault(
        "cache and rows",
        "mlx_llama/core/backends/positions.py",
        "if kind is None:",
        "if kind is None or issubclass(kind, Exception):",
        "a call that fails leaves its positions in the cache",
    ),
    Fault(
        "cache and rows",
        "mlx_llama/mlx_native/kernels/trace.py",
        "if tokens is not buffers.result:",
        "if buffers.result is None:",
        "MLX: rows that step together again get the tokens that their last common step drew",
    ),
    Fault(
        "cache and rows",
        "mlx_llama/mlx_native/cache.py",
        ".copy(0, self.slots[source], length)",
        ".copy(0, self.slots[source]._replace(number=0), length)",
        "MLX: a prefix is copied from the first slot of a shared buffer, whichever row was meant",
    ),
    Fault(
        "cache and rows",
        "cuda_fallback/cache.py",
        "- 1\n            self.versions[row] += 1\n        if tables",
        "- 1\n        if tables",
        "torch: a captured step goes on in the storage that its row has outgrown, if another "
        "row is longer",
    ),
    Fault(
        "cache and rows",
        "cuda_fallback/kernels/attention.py",
        "value_scales = head_address(state, layer, 1, g,",
        "value_scales = head_address(state, layer, 0, g,",
        "Triton's attention, 8-bit cache: values are multiplied by the keys' scales",
    ),
    Fault(
        "scheduler",
        "mlx_llama/core/generation/completion.py",
        '"length" if self.limit == self.max_tokens',
        '"length" if self.limit <= self.max_tokens',
        "an answer that fills the context ends with the reason length",
    ),
    Fault(
        "scheduler",
        "mlx_llama/core/generation/completion.py",
        "text += self.stops.finish()",
        "self.stops.finish()",
        "text that was withheld as the beginning of a stop string is lost at the answer's end",
    ),
    Fault(
        "scheduler",
        "mlx_llama/core/generation/stops.py",
        "for n in range(1, len(stop))}",
        "for n in range(1, len(stop) - 1)}",
        "a stop string that lacks its last character is shown instead of withheld",
    ),
    Fault(
        "scheduler",
        "mlx_llama/core/engine/steps.py",
        "self._last.sequences == sequences and",
        "len(self._last.sequences) == len(sequences) and",
        "a step takes its input from the last step of as many rows, though they are others",
    ),
    Fault(
        "scheduler",
        "mlx_llama/core/engine/scheduler.py",
        "sequence.constraint and sequence.options.logprobs is None and not",
        "sequence.constraint and not",
        "tokens that a grammar forces come without the log-probabilities that were asked for",
    ),
    Fault(
        "scheduler",
        "mlx_llama/core/engine/queues.py",
        "(*self.waiting, *self.admitted) if sequence.is_cancelled",
        "(*self.waiting, *self.running) if sequence.is_cancelled",
        "a request that is cancelled during its prompt computes the rest of it",
    ),
    Fault(
        "scheduler",
        "mlx_llama/core/engine/queues.py",
        "self.waiting.appendleft(sequence)",
        "self.waiting.append(sequence)",
        "a request that was set aside for memory goes to the end of the queue",
    ),
    Fault(
        "scheduler",
        "mlx_llama/core/engine/scheduler.py",
        "sequence.is_cancelled or sequence.needs_token or sequence",
        "sequence.is_cancelled or sequence",
        "a step with a grammar runs ahead of the token that decides its mask",
    ),
    Fault(
        "scheduler",
        "mlx_llama/core/engine/scheduler.py",
        "self._rewind(sequence)  # a rejected",
        "sampled[0] == step.drafts[0] and self._rewind(sequence)  # a rejected",
        "where no draft was right, the wrong ones stay in the cache",
    ),
    Fault(
        "scheduler",
        "mlx_llama/server/slots.py",
        "else 0, -self._used[slot]",
        "else 0, self._used[slot]",
        "a new conversation takes the slot that was used last",
    ),
    Fault(
        "sampling",
        "cpu_fallback/sampling.py",
        "before = np.cumsum(shares) - shares",
        "before = np.cumsum(shares)",
        "NumPy: top-p keeps one token too few",
    ),
    Fault(
        "sampling",
        "cpu_fallback/sampling.py",
        "kept.astype(np.uint32), position)",
        "np.arange(len(kept), dtype=np.uint32), position)",
        "NumPy: behind filters the noise depends on a token's place among those that are left, "
        "not on its id",
    ),
    Fault(
        "sampling",
        "mlx_llama/core/backends/model.py",
        "[row] * count, lengths) if",
        "[row] * count, [lengths[0]] * count) if",
        "in a verification penalties do not count the drafts before a position",
    ),
    Fault(
        "sampling",
        "mlx_llama/mlx_native/kernels/draw.py",
        'keepdims=True) + values["min_p"]',
        'keepdims=True) + values["min_p"] / values["temperature"]',
        "MLX: min-p compares probabilities before the temperature",
    ),
    Fault(
        "sampling",
        "mlx_llama/mlx_native/kernels/draw.py",
        "self.options[max(i, 0)] for i in order]",
        "self.options[max(i, 0)] for i in sorted(order)]",
        "MLX: a row's options go to another slot if the slots are in another order",
    ),
    Fault(
        "sampling",
        "mlx_llama/mlx_native/kernels/trace.py",
        '("draw", len(order), kind)',
        '("draw", len(order), kind._replace(logprobs=None))',
        "MLX: behind a grammar a step with log-probabilities runs as the earlier one without",
    ),
    Fault(
        "sampling",
        "cuda_fallback/kernels/draw.py",
        "age <= values.integer(WINDOW)",
        "age < values.integer(WINDOW)",
        "torch: penalties leave out the oldest token of their window",
    ),
    Fault(
        "sampling",
        "mlx_llama/core/generation/sampling.py",
        "rng.split_seed(o.seed or 0)",
        "rng.split_seed((o.seed or 0) & 0xFFFFFFFF)",
        "MLX and torch: the upper half of a 64-bit seed is ignored",
    ),
    Fault(
        "sampling",
        "cuda_fallback/kernels/tokens.py",
        "at = field(state, NEXT, row) - WINDOW + i",
        "at = field(state, POSITION, row) - WINDOW + i",
        "Triton: penalties do not count the newest token",
    ),
    Fault(
        "sampling",
        "mlx_llama/core/backends/logprobs.py",
        "columns[2 + k:2 + k + count]",
        "columns[2 + count:2 + 2 * count]",
        "a row beside one that asks for more log-probabilities gets token ids in their place",
    ),
    # Files and formats
    Fault(
        "files and formats",
        "mlx_llama/core/files/gguf.py",
        "if nbytes > self._size - start - offset:",
        "if nbytes > self._size - offset:",
        "the end of a tensor is checked without the length of the header",
    ),
    Fault(
        "files and formats",
        "mlx_llama/core/files/folder.py",
        "not _SHARD.fullmatch(shard)",
        "not _SHARD.match(shard)",
        "a shard's name may go on after .safetensors, with /../ too",
    ),
    Fault(
        "files and formats",
        "mlx_llama/core/files/hub.py",
        "fetch(model, revision, parts_of(file), skip=(), local_only=local_only)",
        "fetch(model, revision, parts_of(file), local_only=local_only)",
        "a GGUF file in a subfolder of a hub model is skipped",
    ),
    Fault(
        "files and formats",
        "mlx_llama/core/files/adapters.py",
        "json.dumps([settings, scale], sort_keys=True)",
        "json.dumps(settings, sort_keys=True)",
        "a prompt cache made with another scale of the adapter is taken",
    ),
    Fault(
        "files and formats",
        "mlx_llama/core/files/gguf_quantize.py",
        "d = -_largest(scales, 1) / np.float32(32)",
        "d = _largest(scales, 1) / np.float32(32)",
        "IQ4_XS: the largest group's scale becomes 31 of 32 steps instead of -32, a wrong sign",
    ),
    Fault(
        "files and formats",
        "mlx_llama/core/files/gguf_export.py",
        "writer.add_rope_scaling_attn_factors(factor / usual)",
        "writer.add_rope_scaling_attn_factors(factor)",
        "yarn's own attention factor is written whole, and readers multiply it again",
    ),
    Fault(
        "files and formats",
        "mlx_llama/core/generation/cache_file.py",
        "tokens.max() >= c.vocab_size",
        "tokens.max() > c.vocab_size",
        "a prompt cache with the first id beyond the vocabulary is taken",
    ),
    Fault(
        "files and formats",
        "mlx_llama/core/models/rope_fields.py",
        'local = {"rope_theta": read.raw[local_name]}',
        'local = whole | {"rope_theta": read.raw[local_name]}',
        "Gemma 3: the layers with a window get the scaling of the others, too",
    ),
    Fault(
        "files and formats",
        "mlx_llama/core/files/packed.py",
        "groups = arrays.groups[columns.start // arrays.size : columns.stop // arrays.size]",
        "groups = arrays.groups[: (columns.stop - columns.start) // arrays.size]",
        "GPTQ and AWQ: a part of the columns takes the scales of the first ones",
    ),
    Fault(
        "files and formats",
        "mlx_llama/core/families/gemma2.py",
        "complete_for(wide_layers=46)",
        "complete_for(wide_layers=42)",
        "Gemma 2 in GGUF: the 9B model instead of the 27B is scaled by the width per head",
    ),
    # Text
    Fault(
        "text",
        "mlx_llama/core/text/hf_tokenizer.py",
        'wanted and segment[0] not in (" ", SPACE)',
        'wanted and segment[0] != " "',
        "tokenizer.model: a text that begins with a visible space gets one more",
    ),
    Fault(
        "text",
        "mlx_llama/core/text/gguf_tokenizer.py",
        "ids.append(part)\n                prefix = self.space_prefix\n",
        "ids.append(part)\n                prefix = self.space_prefix and part in self._specials\n",
        "no space before a word that follows a user-defined token",
    ),
    Fault(
        "text",
        "mlx_llama/core/text/tokenizer.py",
        "self._pending = self._pending[e.start + 1 :]",
        "self._pending = self._pending[e.end :]",
        "several bytes that are no character become one U+FFFD, not one each",
    ),
    Fault(
        "text",
        "mlx_llama/core/text/pre_tokenizers.py",
        r'"falcon": (r"[\p{P}\$\+<=>\^~\|`]+"',
        r'"falcon": (r"[\p{P}\$\+<=>\^~\|]+"',
        "falcon's pre-tokenizer does not split at backticks",
    ),
    Fault(
        "text",
        "mlx_llama/core/text/sentencepiece_model.py",
        "if len(piece) < 0x80 else",
        "if len(piece) <= 0x80 else",
        "a GGUF vocabulary with a token of 119 bytes is serialised with a broken length",
    ),
    Fault(
        "text",
        "mlx_llama/core/text/template.py",
        'TOOLS = ("tools", "xml_tools", ',
        'TOOLS = ("tools", ',
        "SmolLM3: control tokens in a tool's description stay control tokens",
    ),
    Fault(
        "text",
        "mlx_llama/core/text/sandbox.py",
        'isinstance(name, str) and name.startswith("_")',
        'isinstance(name, str) and name.startswith("__")',
        "a template may set names with one underscore in a namespace, also Jinja's own dictionary",
    ),
    Fault(
        "text",
        "mlx_llama/core/text/tools/json_calls.py",
        '("name", "arguments", "parameters", "type", "function", "id")',
        '("name", "arguments", "parameters", "type", "function")',
        "a call with an id, as Mistral writes it, is no whole call",
    ),
    Fault(
        "text",
        "mlx_llama/core/generation/stops.py",
        "sorted(beginnings, key=len, reverse=True)",
        "sorted(beginnings, key=len)",
        "too little is held back, and a stop string such as aab is left in the answer",
    ),
    Fault(
        "text",
        "mlx_llama/core/generation/grammar.py",
        "list(self.eos))",
        "[self.eos[0]])",
        "an answer with a grammar can end with the first end token only",
    ),
    # Server
    Fault(
        "server",
        "mlx_llama/server/completions.py",
        "prompt = reader.answers.asks[reader.index].prompt",
        "prompt = reader.answers.asks[0].prompt",
        "echo with several prompts repeats the first one's before every answer",
    ),
    Fault(
        "server",
        "mlx_llama/server/message_writer.py",
        '"input_tokens": completion.prompt_tokens - completion.reused_tokens,',
        '"input_tokens": completion.prompt_tokens,',
        "usage counts cached tokens twice",
    ),
    Fault(
        "server",
        "mlx_llama/server/completions.py",
        "add_bos=not ids, parse",
        "add_bos=True, parse",
        "a prompt that mixes ids and texts has BOS before each text",
    ),
    Fault(
        "server",
        "mlx_llama/server/items.py",
        'if value is None or (value == "" and',
        'if (value == "" and',
        "a message without content is 500 instead of 400",
    ),
    Fault(
        "server",
        "mlx_llama/server/jobs.py",
        "first = int(last) + 1",
        "first = max(0, int(last))",
        "a job's stream that is taken up again repeats the last event",
    ),
    Fault(
        "server",
        "mlx_llama/server/guard.py",
        "(is_read and (path in PUBLIC or path.startswith(PUBLIC_FOLDERS))):",
        "(is_read and path in PUBLIC or path.startswith(PUBLIC_FOLDERS)):",
        "POST /page/render and /page/session need no API key",
    ),
    Fault(
        "server",
        "mlx_llama/server/answers.py",
        "if rows and self.active + len(asks) > limit:",
        "if rows and self.active + len(asks) >= limit:",
        "the queue takes one request less than --queue says",
    ),
    Fault(
        "server",
        "mlx_llama/server/replies.py",
        "sum(completion.prompt_tokens for completion in prompts.values())",
        "sum(completion.prompt_tokens for completion in completions)",
        "usage counts the prompt once for each of n answers",
    ),
    Fault(
        "server",
        "mlx_llama/server/tooling.py",
        "bool(calls) and all(call.is_complete for call in calls)",
        "bool(calls) and any(call.is_complete for call in calls)",
        "finish_reason is tool_calls although the second call was cut by a stop string",
    ),
    Fault(
        "server",
        "mlx_llama/server/page.py",
        'data-language="{escape(language[:40])}"',
        'data-language="{language[:40]}"',
        "the language of a code block reaches the page as HTML",
    ),
    # Commands and REPL
    Fault(
        "commands and REPL",
        "mlx_llama/chat/commands.py",
        'if field.default is None} - {"seed", "speculate"}',
        'if field.default is None} - {"seed"}',
        "/set speculate none resets the option instead of switching speculation off",
    ),
    Fault(
        "commands and REPL",
        "mlx_llama/chat/script.py",
        'else "utf-8").rstrip("\\r\\n")',
        'else "utf-8").rstrip("\\n")',
        "lines of a script that end as on Windows keep a carriage return",
    ),
    Fault(
        "commands and REPL",
        "mlx_llama/chat/view.py",
        "if self.has_shown or error[0] is None:",
        "if self.has_shown:",
        "an empty answer has no line of its own in a pipe",
    ),
    Fault(
        "commands and REPL",
        "mlx_llama/generate.py",
        'requests already)")\n        return _report_failures(results.failed, args.output)\n',
        'requests already)")\n        return 0\n',
        "a finished batch with failed requests exits with 0 when it is started again",
    ),
    Fault(
        "commands and REPL",
        "mlx_llama/quantize.py",
        'args.bits is args.group_size is None\n        and args.format == "mlx"',
        'args.bits is None\n        and args.format == "mlx"',
        "--group-size is ignored for a quantised GGUF file",
    ),
    Fault(
        "commands and REPL",
        "mlx_llama/doctor.py",
        '        if name is not None:\n            raise OptionsError("--clear-cache',
        '        if args.name is not None:\n            raise OptionsError("--clear-cache',
        "--clear-cache --model M removes all models' files without a word",
    ),
    Fault(
        "commands and REPL",
        "mlx_llama/bench/command.py",
        'cli.say(f"wrote {args.plot}")',
        'print(f"wrote {args.plot}")',
        "--plot writes its remark on stdout, behind the JSON",
    ),
    Fault(
        "commands and REPL",
        "mlx_llama/parity/modes.py",
        "return 0 if all(comparison.is_within for comparison in comparisons) else 1",
        "return 0 if any(comparison.is_within for comparison in comparisons) else 1",
        "parity exits with 0 if one of several backends is within",
    ),
    Fault(
        "commands and REPL",
        "mlx_llama/core/generation/session.py",
        "self.dropped = self.dropped if self.dropped < start else 0",
        "self.dropped = self.dropped if self.dropped <= start else 0",
        "/undo of the first turn that the model still saw leaves all older ones dropped",
    ),
    Fault(
        "commands and REPL",
        "mlx_llama/core/generation/session_file.py",
        "write_file(path, text.encode(), is_private=True)",
        "write_file(path, text.encode())",
        "others may read a saved conversation",
    ),
]

# Patterns of tests that run first, by the beginning of the touched file's name, after the test of
# the file's own name
NEAR = {
    "cpu_fallback/kernels/": ["tests/backends/kernels/test_*.py"],
    "cpu_fallback/": [
        "tests/backends/test_cache.py",
        "tests/backends/kernels/test_rows.py",
        "tests/backends/test_sampling.py",
        "tests/backends/test_parity.py",
    ],
    "cuda_fallback/": [
        "tests/backends/test_captured_step.py",
        "tests/backends/test_triton.py",
        "tests/backends/test_cuda_*.py",
        "tests/backends/test_sampling.py",
    ],
    "mlx_llama/mlx_native/": [
        "tests/backends/test_compiled_step.py",
        "tests/backends/test_mlx_*.py",
        "tests/backends/test_sampling.py",
    ],
    "mlx_llama/core/backends/": [
        "tests/backends/test_cache.py",
        "tests/backends/test_sampling.py",
        "tests/backends/test_speculate.py",
    ],
    "mlx_llama/core/engine/": [
        "tests/core/engine/test_scheduler.py",
        "tests/core/engine/test_*.py",
        "tests/core/generation/test_adapters.py",
    ],
    "mlx_llama/core/families/": ["tests/core/families/test_*.py"],
    "mlx_llama/core/models/": ["tests/core/models/test_*.py", "tests/core/families/test_*.py"],
    "mlx_llama/core/generation/": ["tests/core/generation/test_*.py"],
    "mlx_llama/core/files/": ["tests/core/files/test_*.py"],
    "mlx_llama/core/text/": ["tests/core/text/**/test_*.py"],
    "mlx_llama/server/": ["tests/doors/server/test_*.py"],
}
BACKENDS = "tests/backends/**/test_*.py"
ENGINE, GENERATION = "tests/core/engine/test_*.py", "tests/core/generation/test_*.py"
HOST, MODELS, FAMILIES, REAL = (
    "tests/core/backends/test_*.py",
    "tests/core/models/test_*.py",
    "tests/core/families/test_*.py",
    "tests/real/**/test_*.py",
)
# Those that run after them, by area
FAR = {
    "forward": [HOST, MODELS, FAMILIES, BACKENDS, REAL],
    "cache and rows": [HOST, BACKENDS, ENGINE, GENERATION, REAL],
    "scheduler": [ENGINE, GENERATION, BACKENDS, REAL],
    "sampling": [HOST, BACKENDS, ENGINE, GENERATION, REAL],
    "files and formats": [
        "tests/core/files/test_*.py",
        MODELS,
        FAMILIES,
        "tests/backends/test_quantized.py",
        REAL,
    ],
    "text": ["tests/core/text/**/test_*.py", GENERATION, REAL],
    "server": ["tests/doors/server/test_*.py"],
    "commands and REPL": ["tests/doors/test_*.py"],
}
# Compiled kernels are cached by their own sources alone; a fault in one of these folders may change
# them too.
COMPILED = (
    "cpu_fallback/",
    "mlx_llama/core/files/",
    "mlx_llama/core/backends/",
    "mlx_llama/core/models/",
)


def choose_tests(fault: Fault, tree: Path) -> list[list[str]]:
    """Names of test files by run: the nearest ones, then the others of the area, each once."""

    def expand(patterns: Iterable[str]) -> list[str]:
        # Files, since pytest would take those of a folder in its own order.
        expanded = (path for pattern in patterns for path in sorted(tree.glob(pattern)))
        return list(dict.fromkeys(str(path.relative_to(tree)) for path in expanded))

    path = Path(fault.file)
    # mlx_llama/core/files/x.py -> tests/core/files/test_x.py
    mirrors = [
        Path("tests", *path.parts[1:-1], f"test_{path.name}"),
        Path("tests/doors", *path.parts[1:-1], f"test_{path.name}"),  # of mlx_llama/server
        Path("tests/backends", f"test_{path.name}"),
        Path(f"tests/doors/test_{Path(path.parts[1]).stem}*.py"),  # of the other commands
    ]
    near = next(
        (patterns for prefix, patterns in NEAR.items() if fault.file.startswith(prefix)), []
    )
    first = expand([*map(str, mirrors), *near])
    rest = [name for name in expand(FAR[fault.area]) if name not in first]
    return [names for names in (first, rest) if names]


def check(faults: Sequence[Fault]) -> list[str]:
    """Errors in the texts of the faults: a count per area, a text that does not occur once, a file
    that does not compile.
    """
    wrong = [
        f"area {area!r} has {count} faults, not {PER_AREA}"
        for area in AREAS
        if (count := sum(fault.area == area for fault in faults)) != PER_AREA
    ]
    wrong += [
        f"area {area!r} is not known"
        for area in sorted({fault.area for fault in faults} - set(AREAS))
    ]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "patched.py")
        for number, fault in enumerate(faults, 1):
            text = (ROOT / fault.file).read_text(encoding="utf-8")
            if (count := len(fault.pattern.findall(text))) != 1 or fault.old == fault.new:
                wrong.append(f"{number}: {fault.file} has {count} times {fault.old!r}")
                continue
            target.write_text(fault.plant(text), encoding="utf-8")
            try:
                if fault.file.endswith(".py"):
                    py_compile.compile(str(target), doraise=True)
            except py_compile.PyCompileError as error:
                wrong.append(f"{number}: {fault.file} does not compile: {error}")
    return wrong


class Copy:
    """A copy of the tree in a folder of its own, with caches of its own."""

    def __init__(self, folder: Path):
        self.tree, self.caches = folder / "tree", folder / "cache"
        listed = subprocess.run(
            [
                "git",
                "-C",
                str(ROOT),
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
            ],
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():  # not removed
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)
        self.process: subprocess.Popen | None = None
        self.is_stopped = False

    def try_out(
        self, fault: Fault, runs: Iterable[Sequence[str]], flags: Sequence[str], limit: float
    ) -> tuple[str, str]:
        """("seen", "UNSEEN" or "error", the test that saw it or the reason)."""
        path = self.tree / fault.file
        text = path.read_text(encoding="utf-8")
        is_compiled = fault.file.startswith(COMPILED)
        caches = Path(tempfile.mkdtemp(dir=self.caches.parent)) if is_compiled else self.caches
        self._write(path, fault.plant(text))
        has_run = False
        try:
            for run in runs:
                status, detail = self._run([*flags, *run], caches, limit)
                if status in ("seen", "error"):
                    return status, detail
                has_run |= status != "no tests"  # those of one run may all be slow ones
            return ("UNSEEN", "") if has_run else ("error", "there are no tests")
        finally:
            self._write(path, text)
            # no fault has the examples of another
            shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
            if is_compiled:
                shutil.rmtree(caches, ignore_errors=True)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()  # it would be used if it had the same second and size

    def _run(self, arguments: Sequence[str], caches: Path, limit: float) -> tuple[str, str]:
        models = user_cache_path("mlx_llama", appauthor=False) / "test-models"
        paths = os.pathsep.join(filter(None, [str(self.tree), os.environ.get("PYTHONPATH")]))
        env = {
            "MLX_LLAMA_TEST_MODELS": str(models),
            **os.environ,
            "PYTHONPATH": paths,
            "XDG_CACHE_HOME": str(caches),
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0",
            "-x",
            "-q",
            "-rfE",
            "-p",
            "no:cacheprovider",
            *arguments,
        ]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.tree,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            size, changed = 0, time.monotonic()
            while (code := self.process.poll()) is None and time.monotonic() - changed < limit:
                time.sleep(0.2)
                # pytest writes a dot for each test
                if (now := os.fstat(log.fileno()).st_size) != size:
                    size, changed = now, time.monotonic()
            self.stop(for_good=False)
            log.seek(0)
            output = log.read()
        if code is None:
            return "seen", "hung"
        if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return "no tests" if code else "UNSEEN", ""
        if code in (
            -signal.SIGSEGV,
            -signal.SIGBUS,
            -signal.SIGABRT,
            -signal.SIGFPE,
            -signal.SIGILL,
        ):
            return "seen", f"crashed by {signal.Signals(-code).name}"
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.M)
        if code == pytest.ExitCode.TESTS_FAILED and failed:
            return "seen", failed[1][:120]
        return (
            "error",
            f"pytest ended with {code}: {(output.strip().splitlines() or ['no output'])[-1]}",
        )

    def stop(self, for_good: bool = True) -> None:
        """Kill the run and what it started. for_good: there is no next one."""
        self.is_stopped |= for_good
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def run(
    numbers: Sequence[int], jobs: int, flags: Sequence[str], limit: float, tests: Sequence[str]
) -> list[str]:
    """Try faults of these numbers; prints a line for each. tests: in place of the table's. Returns
    lines of the unseen.
    """
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in numbers:
        todo.put(number)
    missed: dict[int, str] = {}
    printing = threading.Lock()

    def work(copy: Copy) -> None:
        while not copy.is_stopped:
            try:
                number = todo.get_nowait()
            except queue.Empty:
                return
            fault, started = FAULTS[number - 1], time.monotonic()
            status, detail = copy.try_out(
                fault, [tests] if tests else choose_tests(fault, copy.tree), flags, limit
            )
            if copy.is_stopped:
                return
            with printing:
                seconds = time.monotonic() - started
                print(
                    f"{number:3} {fault.area}: {status} {seconds:.0f} s {detail or '-'} | "
                    f"{fault.says}",
                    flush=True,
                )
                if status != "seen":
                    missed[number] = f"{number:3} {status} {fault.area}, {fault.file}: {fault.says}"

    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copies = [Copy(Path(folder, str(job))) for job in range(min(jobs, len(numbers)))]
        threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # Ctrl-C too
            for copy in copies:
                copy.stop()
            for thread in threads:
                if thread.ident:
                    thread.join()
    return [missed[number] for number in sorted(missed)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="run the slow tests too")
    parser.add_argument("--area", choices=AREAS, help="the faults of one area")
    parser.add_argument("--only", metavar="N,N", help="the faults of these numbers")
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="J", help="copies at once (default: 2)"
    )
    parser.add_argument(
        "--seconds", type=float, default=600, metavar="S", help="a longer test hangs (default: 600)"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the faults and their first tests"
    )
    parser.add_argument("--check", action="store_true", help="check the texts of the faults")
    parser.add_argument("tests", nargs="*", help="tests to run in place of the area's")
    args = parser.parse_args()
    numbers = (
        [int(chosen) for chosen in args.only.split(",")]
        if args.only
        else list(range(1, len(FAULTS) + 1))
    )
    if not all(1 <= number <= len(FAULTS) for number in numbers):
        parser.error(f"the faults have the numbers 1 to {len(FAULTS)}")
    numbers = [number for number in numbers if args.area in (None, FAULTS[number - 1].area)]
    if args.check:
        wrong = check(FAULTS)
        print("\n".join(wrong or [f"{len(FAULTS)} faults are in order"]))
        return int(bool(wrong))
    if args.list:
        for number in numbers:
            fault = FAULTS[number - 1]
            print(
                f"{number:3} {fault.area}, {fault.file}: {fault.says} | "
                f"{choose_tests(fault, ROOT)[0][0]}"
            )
        return 0
    missed = run(numbers, args.jobs, ["--all"] if args.all else [], args.seconds, args.tests)
    print("\n".join([f"seen {len(numbers) - len(missed)} of {len(numbers)}", *missed]))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
