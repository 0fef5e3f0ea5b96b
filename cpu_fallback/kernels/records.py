"""Operations of a program as records of int64, which the compiled interpreter reads."""

from __future__ import annotations

from .emit import Function, Module, Value, f32, i64
from .layouts import ActivationLayout, Layout

WORDS = 32  # in a record

# Fields of every record.
COMMON = (
    "kind",  # number of the operation
    "items",  # their count, ...
    "per_token",  # ... times the context's tokens, if this is 1
    "portion",  # items that a thread takes at a time
    "wait",  # whether a barrier follows
    "counters",  # address of the counters of the threads' shares
)
# Operands by kind. Addresses are of float32 by default. "X_bytes" is the stride of X in bytes from
# one token to the next, of x a token's share of its tile.
_STREAM = "target target_bytes groups"  # rows of `groups` groups, changed in place
# a, b: see packing.pack; part: an item's share of a row's groups; x: the records to write; width,
# eps: the norm's; scratch: a cache line for each thread
_PACKED = "a a_bytes b b_bytes groups part x x_bytes width eps scratch"
# Offsets in a page; in a row's table of pages, bytes to the first of the layer's window and from
# one to the next
_CACHED = "page_keys page_values key_scales value_scales page_kind page_step"
OPERANDS = {
    # items: panels. out[token] = panels times x[token] (+ bias) (+ out)
    "product": "weights panel_bytes blocks x x_bytes out out_bytes bias accumulate",
    # items: tokens. delta times factor (and a norm's weight, unless 0) -> target (+ target), all
    # times `scale` in the kind "adjust scaled"
    "adjust": "delta delta_bytes weight factor target target_bytes accumulate groups width eps"
    " scratch scale",
    "softcap": f"{_STREAM} cap",  # items: tokens
    # items: tokens. Zeros in the rows of tokens that do not have the adapter of this number
    "select": f"{_STREAM} adapter",
    "pack": _PACKED,  # items: parts of a token's groups, by tile, part, token
    # items: tokens. RMS norm of every head of query and key, in place; a norm of all heads sees one
    # head of their width
    "norm_heads": "qkv qkv_bytes heads key_heads query_width key_width keys_at query_weight"
    " key_weight eps",
    # items: tokens. RMS norm, without weights, of heads at `source_at`, which are written at `at`
    "norm_values": "qkv qkv_bytes heads size source_at at eps",
    # items: tokens. Each head of the queries times weight, in place
    "scale_heads": "qkv qkv_bytes heads size weight",
    # items: key heads of tokens. Rotate queries and keys in place if `rotates`, by the layer's
    # angles in a row of the tables; store keys and values in pages of their row
    "rotate": f"qkv qkv_bytes heads key_heads keys_at values_at {_CACHED} rotates table_at"
    " query_table_at",
    # items: key heads of tokens. Rotate the queries that share them, in place
    "rotate_queries": "qkv qkv_bytes heads key_heads query_table_at",
    # items: layers of tokens. embedded * root + the norm of x * factor, in place of embedded, all
    # times scale
    "layer_inputs": "x x_bytes embedded embedded_bytes layers size weight root factor scale eps",
    # items: 1. scores -> chosen experts of each token, their shares, tiles of their rows;
    # expert_scale: of the kind "route scaled"
    "route": "scores scores_bytes experts used sharing bias groups used_groups ranks scale chosen"
    " shares counts tiles order rows expert_scale",
    # items: parts of the groups of each tile, for as many tiles as there may be. is_sorted: 1: rows
    # of a are the tiles' rows; 0: tokens. shares: of the assignments, to multiply by; or 0
    "gather": f"{_PACKED} tiles order used is_sorted shares",
    # items: parts of the panels for each tile, for as many tiles as there may be. out[row] = its
    # expert's panels times x[row]; weights: addresses of all experts' panels; biases: or 0
    "experts": "weights panel_bytes panels part blocks x x_bytes out out_bytes tiles biases"
    " bias_bytes",
    # items: tokens. The sum of outputs times shares -> out (+ out)
    "combine": "outputs outputs_bytes rows shares used vectors out out_bytes accumulate",
    # items: tokens. x times the sigmoid of the token's score -> out (+ out)
    "gate_output": "x x_bytes score score_bytes vectors out out_bytes accumulate",
    # items: vectors of channels, for all tokens. weights: by position, those of `history` earlier
    # ones first; state: offset in a row's block, in bytes
    "convolve": "x x_bytes channels history weights weights_bytes bias state out out_bytes",
    # items: value heads, for all tokens. x: queries, keys and values; shared: value heads in a row
    # that have one key head; norm: weights of the output's; state: as of convolve
    "gated_delta": "x x_bytes strengths strengths_bytes decays decays_bytes rates biases norm"
    " key_heads shared key_size value_size state out out_bytes eps scale",
    # items: key heads of tokens. is_chunk: 1: the window begins at a multiple of its size
    "attend": f"qkv qkv_bytes shared key_heads out out_bytes {_CACHED} window is_chunk scale sinks",
}
FLOATS = {"factor", "width", "eps", "cap", "scale", "root"}  # a float32 in the low half of the word
FIELDS = {
    kind: {name: index for index, name in enumerate((*COMMON, *operands.split()))}
    for kind, operands in OPERANDS.items()
}
# Arguments of a call: tokens; first_row: of the buffers; places: address of the first token's
# PLACE; scratch of attention's scores: of all threads, bytes of a thread's, of a head's; sync: of
# the barrier; states: address of the first token's STATES.
_CONTEXT = "tokens first_row places scores scores_bytes scores_head_bytes sync states"
CONTEXT = {name: index for index, name in enumerate(_CONTEXT.split())}
# A token's place in the cache. pages: address of the row's page table; cosine, sine: addresses of
# the position's angles; adapter: number of the row's adapter.
_PLACE = "position pages cosine sine adapter"
PLACE = {name: index for index, name in enumerate(_PLACE.split())}
# Addresses of the block of a token's row: its states before the token, and where to write those
# after it
STATES = 2


def kind_of(word: str, *parts: Layout | ActivationLayout | str) -> str:
    """The name of an operation for these layouts: "product float32", "pack norm float_0_0"."""
    return " ".join([word, *(getattr(part, "name", part) for part in parts)])


class Operation(Function):
    """An operation's function under construction, of items lo .. hi - 1 of a record.

    Operands are attributes, like parameters.
    """

    def __init__(self, module: Module, name: str):
        self.fields = FIELDS[name.split()[0]]
        parameters = dict.fromkeys(("op", "lo", "hi", "thread", "context"), i64)
        super().__init__(module, "op " + name, parameters)

    def __getattr__(self, name: str) -> Value:
        if name in self.__dict__["fields"]:
            return self.load_word(self.op, self.fields[name])
        raise AttributeError(name)

    def load_float(self, name: str) -> Value:
        """A float32 operand, in the low half of its word."""
        return self.load(f32, self.op, 8 * self.fields[name])

    def load_context(self, name: str) -> Value:
        return self.load_word(self.context, CONTEXT[name])

    def place(self, token: Value) -> dict[str, Value]:
        record = self.load_context("places") + token * (8 * len(PLACE))
        return {name: self.load_word(record, index) for name, index in PLACE.items()}

    def states(self, token: Value) -> list[Value]:
        record = self.load_context("states") + token * (8 * STATES)
        return [self.load_word(record, index) for index in range(STATES)]
