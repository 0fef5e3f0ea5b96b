"""LLVM code from Python: functions, values with operators, loops and mutable variables.

An address is an i64, so that address arithmetic reads like arithmetic. Vectors have 16 lanes of 32
bits on every target; LLVM splits them for narrower registers.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import repeat
from typing import Any

import numpy as np
from llvmlite import ir

LANES = 16  # float32 or int32 lanes of a vector: rows of a panel, positions of a block of keys

i8, i16, i32, i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
f16, f32 = ir.HalfType(), ir.FloatType()


# lanes of the halves of a vector, then of one half's halves, down to one lane each
_HALVES = [(list(range(width)), list(range(width, 2 * width))) for width in (8, 4, 2, 1)]
# coefficients of `Function.exp` after the first
_EXP = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


class _BFloatType(ir.HalfType):
    """bfloat16, which llvmlite lacks, to pass vectors to intrinsics; no constants."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


bf16 = _BFloatType()
void, pointer = ir.VoidType(), ir.PointerType()


def vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, lanes)


f32s, i32s = vector(f32), vector(i32)


def _is_float(type_: ir.Type) -> bool:
    return isinstance(getattr(type_, "element", type_), (ir.FloatType, ir.HalfType))


def _element_bytes(type_: ir.Type) -> int:
    element = getattr(type_, "element", type_)
    return {f16: 2, f32: 4}.get(element) or element.width // 8


def _constant(type_: ir.Type, value: int | float | list) -> ir.Constant:
    if isinstance(type_, ir.VectorType) and not isinstance(value, list):
        value = [value] * type_.count
    return ir.Constant(type_, value)


class Module(ir.Module):
    """LLVM code under construction."""

    def __init__(self) -> None:
        super().__init__("mlx_llama")
        self.kernels: dict[tuple, Function] = {}  # written so far, see `kernel`


def kernel(write: Callable[..., None]) -> Callable[..., Function]:
    """Make write(f, *parameters, *, constants) a function build(module, *constants, public=False).

    Parameters of the LLVM function are int64, unless annotated with another type. `build` writes
    the code for its constants once in a module, and returns the Function.
    """

    @functools.cache  # read at its first use: a start from cached code needs few kernels
    def read() -> tuple[dict[str, ir.Type], inspect.Signature]:
        """Parameters of the LLVM function, and constants."""
        _, *others = inspect.signature(write, eval_str=True).parameters.values()
        constants = [p for p in others if p.kind is p.KEYWORD_ONLY]
        types = [(p.name, p.annotation) for p in others if p not in constants]
        constants = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in constants]
        types = {name: i64 if type_ is inspect.Parameter.empty else type_ for name, type_ in types}
        return types, inspect.Signature(constants)

    def bind(*arguments, **options) -> dict[str, Any]:
        bound = read()[1].bind(*arguments, **options)
        bound.apply_defaults()
        return bound.arguments

    def name(*arguments, **options) -> str:
        labels = [getattr(value, "name", value) for value in bind(*arguments, **options).values()]
        return "_".join(map(str, (write.__name__.strip("_"), *labels)))

    @functools.wraps(write)
    def build(module: Module, *arguments, public: bool = False, **options) -> Function:
        constants = bind(*arguments, **options)
        key = (write, *constants.values())
        if key not in module.kernels:
            f = Function(module, name(**constants), read()[0], public)
            write(f, **f.parameters, **constants)
            module.kernels[key] = f.finish()
        return module.kernels[key]

    build.name = name  # the LLVM function's, by its constants
    build.parameters = lambda: len(read()[0])  # their number
    return build


def _operator(integer: str, floating: str = "") -> Callable[[Value, Any], Value]:
    """An operator of Value by LLVM's instructions."""

    def apply(self: Value, other: Value | int | float) -> Value:
        name = floating if _is_float(self.type) else integer
        return self.emit(name, self.function.raw(other, self.type))

    return apply


def _convert(name: str, element: ir.Type) -> Callable[[Value], Value]:
    """A conversion to another element by LLVM's instruction."""

    def convert(self: Value) -> Value:
        is_vector = isinstance(self.type, ir.VectorType)
        return self.emit(name, vector(element, self.type.count) if is_vector else element)

    return convert


class Value:
    """A number or vector in a function under construction, with + - * / and, for integers, & | ^ << >> // %.

    A Python number on the right is a constant of the same type. >>, // and % are unsigned.
    """  # noqa: E501

    def __init__(self, function: Function, raw: ir.Value):
        self.function = function
        self.raw = raw

    @property
    def type(self) -> ir.Type:
        return self.raw.type

    def emit(self, instruction: str, *operands: Any) -> Value:
        """Append an instruction of llvmlite's IRBuilder, whose first operand is this value."""
        append = getattr(self.function.builder, instruction)
        return Value(self.function, append(self.raw, *operands))

    __add__ = __radd__ = _operator("add", "fadd")
    __sub__ = _operator("sub", "fsub")
    __mul__ = __rmul__ = _operator("mul", "fmul")
    __truediv__ = _operator("", "fdiv")
    __floordiv__ = _operator("udiv")
    __mod__ = _operator("urem")
    __and__ = _operator("and_")
    __or__ = _operator("or_")
    __xor__ = _operator("xor")
    __lshift__ = _operator("shl")
    __rshift__ = _operator("lshr")
    arithmetic_shift = _operator("ashr")  # right, keeping the sign

    def compare(self, operator: str, other: Value | int | float) -> Value:
        """Compare as signed integers or ordered floats: "<", "<=", ">", ">=", "==", "!="."""
        builder = self.function.builder
        compare = builder.fcmp_ordered if _is_float(self.type) else builder.icmp_signed
        right = self.function.raw(other, self.type)
        return Value(self.function, compare(operator, self.raw, right))

    __lt__ = functools.partialmethod(compare, "<")
    __gt__ = functools.partialmethod(compare, ">")

    def select(self, yes: Value, no: Value | int | float) -> Value:
        """`yes` where this condition holds, else `no`."""
        return self.emit("select", yes.raw, self.function.raw(no, yes.type))

    def minimum(self, other: Value | int) -> Value:
        """The smaller of two signed integers."""
        return self.compare("<", other).select(self, other)

    # to an integer type
    sign_extend = functools.partialmethod(emit, "sext")
    zero_extend = functools.partialmethod(emit, "zext")
    truncate = functools.partialmethod(emit, "trunc")  # keeps the low bits
    bitcast = functools.partialmethod(emit, "bitcast")  # to any type of the same size
    to_float = _convert("sitofp", f32)  # from int32, rounding to nearest
    to_int = _convert("fptosi", i32)  # from float32, rounding towards zero
    widen_half = _convert("fpext", f32)
    narrow_half = _convert("fptrunc", f16)  # rounding to nearest

    def splat(self, lanes: int = LANES) -> Value:
        """Broadcast to all lanes of a vector."""
        empty = Value(self.function, ir.Constant(vector(self.type, lanes), ir.Undefined))
        return empty.insert_lane(0, self).shuffle([0] * lanes, empty)

    def extract_lane(self, index: int) -> Value:
        return self.emit("extract_element", i32(index))

    def insert_lane(self, index: int, value: Value) -> Value:
        return self.emit("insert_element", value.raw, i32(index))

    def shuffle(self, lanes: list[int], other: Value | None = None) -> Value:
        """Select lanes by number, counting the lanes of `other` after this vector's."""
        other = self if other is None else other
        mask = ir.Constant(vector(i32, len(lanes)), lanes)
        return self.emit("shuffle_vector", other.raw, mask)


def concatenate(parts: list[Value]) -> Value:
    """Concatenate the lanes of 1, 2 or 4 vectors."""
    while len(parts) > 1:
        lanes = list(range(2 * parts[0].type.count))
        parts = [low.shuffle(lanes, high) for low, high in zip(parts[::2], parts[1::2])]
    return parts[0]


class Rows(list):
    """Values in a row; operators apply to each, with another row's or a single value."""

    def _apply(self, operation: Callable, other: Any) -> Rows:
        return Rows(map(operation, self, other if isinstance(other, Rows) else repeat(other)))

    __add__ = __iadd__ = functools.partialmethod(_apply, operator.add)
    __sub__ = functools.partialmethod(_apply, operator.sub)
    __mul__ = __imul__ = functools.partialmethod(_apply, operator.mul)
    __and__ = functools.partialmethod(_apply, operator.and_)
    __or__ = functools.partialmethod(_apply, operator.or_)
    __lshift__ = functools.partialmethod(_apply, operator.lshift)
    __rshift__ = functools.partialmethod(_apply, operator.rshift)


class Variable:
    """A mutable value, which LLVM keeps in a register."""

    def __init__(self, function: Function, initial: Value):
        self.function = function
        with function.builder.goto_entry_block():
            self.pointer = function.builder.alloca(initial.type)
        self.type = initial.type
        self.set(initial)

    def get(self) -> Value:
        return Value(self.function, self.function.builder.load(self.pointer, typ=self.type))

    def set(self, value: Value) -> None:
        self.function.builder.store(value.raw, self.pointer)


class Function:
    """A function under construction. Parameters are attributes, such as `f.out`."""

    def __init__(
        self, module: Module, name: str, parameters: Mapping[str, ir.Type], public: bool = False
    ):
        self.module = module
        self.ir = ir.Function(module, ir.FunctionType(void, list(parameters.values())), name)
        self.ir.attributes.add("nounwind")
        if not public:
            self.ir.linkage = "internal"
            self.ir.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.ir.append_basic_block("entry"))
        self.parameters = {key: Value(self, raw) for key, raw in zip(parameters, self.ir.args)}
        vars(self).update(self.parameters)

    def raw(self, value: Value | int | float, type_: ir.Type) -> ir.Value:
        """The LLVM value of a Value or a Python number."""
        return value.raw if isinstance(value, Value) else _constant(type_, value)

    def constant(self, type_: ir.Type, value: int | float | list) -> Value:
        return Value(self, _constant(type_, value))

    def zero(self, type_: ir.Type) -> Value:
        return self.constant(type_, 0.0 if _is_float(type_) else 0)

    def load(
        self, type_: ir.Type, address: Value, offset: Value | int = 0, align: int | None = None
    ) -> Value:
        """Load from an address that is a multiple of `align`, None for the size of an element."""
        place, align = self._pointer(address, offset), align or _element_bytes(type_)
        return Value(self, self.builder.load(place, align=align, typ=type_))

    def load_word(self, record: Value, index: int) -> Value:
        """Load word `index`, int64, of a record."""
        return self.load(i64, record, 8 * index)

    def load_as_float32(
        self, dtype: str, address: Value, offset: Value | int = 0, lanes: int = LANES
    ) -> Value:
        """Load `lanes` numbers of a dtype, "float32", "float16" or "bfloat16"."""
        if dtype == "float32":
            return self.load(vector(f32, lanes), address, offset)
        if dtype == "float16":
            return self.load(vector(f16, lanes), address, offset).widen_half()
        # bfloat16 is the upper half of a float32.
        half = self.load(vector(i16, lanes), address, offset)
        return (half.zero_extend(vector(i32, lanes)) << 16).bitcast(vector(f32, lanes))

    def allocate_stack(self, nbytes: int) -> Value:
        """Allocate on the stack; returns the address."""
        with self.builder.goto_entry_block():
            memory = self.builder.alloca(vector(i8, nbytes))
        return Value(self, self.builder.ptrtoint(memory, i64))

    def store(
        self, value: Value, address: Value, offset: Value | int = 0, align: int | None = None
    ) -> None:
        """Store to an address, as `load`."""
        align = align or _element_bytes(value.type)
        self.builder.store(value.raw, self._pointer(address, offset), align=align)

    def prefetch(self, address: Value, nbytes: int, level: int = 2) -> None:
        """Prefetch lines into the cache of a level, 1 or 2; 0: for a single use."""
        name = "llvm.prefetch.p0"
        flags = [i32(0), i32(4 - level if level else 0), i32(1)]  # to read, locality, data
        kind = ir.FunctionType(void, [pointer, i32, i32, i32])
        declared = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        for line in range(0, nbytes, 64):
            self.builder.call(declared, [self._pointer(address, line), *flags])

    def _pointer(self, address: Value, offset: Value | int = 0) -> ir.Value:
        if not (isinstance(offset, int) and offset == 0):
            address = address + offset
        return self.builder.inttoptr(address.raw, pointer)

    def call(self, function: Function, *arguments: Value | int | float) -> Value:
        types = function.ir.function_type.args
        raws = [self.raw(value, type_) for value, type_ in zip(arguments, types, strict=True)]
        return Value(self, self.builder.call(function.ir, raws))

    def call_address(
        self, address: Value, types: list[ir.Type], *arguments: Value, result: ir.Type = void
    ) -> Value:
        """Call the function at an address."""
        callee = self.builder.inttoptr(address.raw, ir.FunctionType(result, types).as_pointer())
        return Value(self, self.builder.call(callee, [value.raw for value in arguments]))

    def intrinsic(self, name: str, result: ir.Type, *arguments: Value) -> Value:
        """Call an LLVM intrinsic or an external function."""
        declared = self.module.globals.get(name)
        if declared is None:
            types = [value.type for value in arguments]
            declared = ir.Function(self.module, ir.FunctionType(result, types), name)
        return Value(self, self.builder.call(declared, [value.raw for value in arguments]))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c of float32 vectors, rounded once."""
        return self.intrinsic(f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)

    def math(self, name: str, x: Value) -> Value:
        """Call llvm.<name> on a float32 vector or number: sqrt, fabs, rint."""
        suffix = f"v{x.type.count}f32" if isinstance(x.type, ir.VectorType) else "f32"
        return self.intrinsic(f"llvm.{name}.{suffix}", x.type, x)

    def exp(self, x: Value) -> Value:
        """exp of 16 floats within 2 ulps, by Cephes' polynomial (Moshier, expf.c)."""

        def real(number: float) -> Value:
            return self.constant(f32s, float(np.float32(number)))

        x = self.smaller(self.larger(x, -87.0), 88.0)
        n = self.math("rint", x * real(1.44269504))
        r = self.fma(n, real(-0.693359375), x)
        r = self.fma(n, real(2.12194440e-4), r)
        p = real(1.9875691500e-4)
        for c in _EXP:
            p = self.fma(p, r, real(c))
        y = self.fma(p, r * r, r) + real(1.0)
        return y * ((n.to_int() + 127) << 23).bitcast(f32s)

    def reduce_max(self, values: Value) -> Value:
        """The largest lane of a float32 (without NaN) or signed int32 vector."""
        if not _is_float(values.type):
            return self.intrinsic("llvm.vector.reduce.smax.v16i32", i32, values)
        for low, high in _HALVES:  # LLVM's reduction of floats is sequential
            values = self.larger(values.shuffle(low), values.shuffle(high))
        return values.extract_lane(0)

    def reduce_sum(self, values: Value) -> Value:
        """The sum of the lanes, of float32 in pairwise halves, the same order on every target."""
        if not _is_float(values.type):
            return self.intrinsic("llvm.vector.reduce.add.v16i32", i32, values)
        for low, high in _HALVES:
            values = values.shuffle(low) + values.shuffle(high)
        return values.extract_lane(0)

    def larger(self, a: Value, b: Value | float) -> Value:
        """The larger of two floats; b if either is NaN. One instruction, unlike llvm.maxnum."""
        return a.compare(">", b).select(a, b)

    def smaller(self, a: Value, b: Value | float) -> Value:
        """The smaller of two floats, lane by lane; b if either is NaN."""
        return a.compare("<", b).select(a, b)

    @contextmanager
    def loop(self, count: Value | int, start: Value | int = 0, step: int = 1) -> Iterator[Value]:
        """for (i64 i = start; i < count; i += step)"""
        builder, before = self.builder, self.builder.block
        head, body, after = (builder.append_basic_block() for _ in range(3))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(i64)
        index.add_incoming(self.raw(start, i64), before)
        builder.cbranch(builder.icmp_signed("<", index, self.raw(count, i64)), body, after)
        builder.position_at_end(body)
        yield Value(self, index)
        index.add_incoming(builder.add(index, i64(step)), builder.block)
        builder.branch(head)
        builder.position_at_end(after)

    def loop_numbers(self, count: Value) -> Iterator[tuple[ir.Type, Value]]:
        """Loops over float32 numbers, LANES at a time, then the rest: (type to load, offset)."""
        whole = count // LANES * LANES
        with self.loop(whole, 0, LANES) as d:
            yield f32s, d * 4
        with self.loop(count, whole) as d:
            yield f32, d * 4

    @contextmanager
    def forever(self) -> Iterator[Callable[[Value], None]]:
        """A loop. The body receives break_if(condition)."""
        builder = self.builder
        body, after = builder.append_basic_block(), builder.append_basic_block()
        builder.branch(body)
        builder.position_at_end(body)

        def break_if(condition: Value) -> None:
            stay = builder.append_basic_block()
            builder.cbranch(condition.raw, after, stay)
            builder.position_at_end(stay)

        yield break_if
        builder.branch(body)
        builder.position_at_end(after)

    def if_then(self, condition: Value) -> AbstractContextManager:
        return self.builder.if_then(condition.raw)

    def if_else(self, condition: Value) -> AbstractContextManager[tuple]:
        """Branch: `with f.if_else(c) as (yes, no):`, then `with yes:` and `with no:`."""
        return self.builder.if_else(condition.raw)

    def atomic_add(self, address: Value, value: Value | int) -> Value:
        """Add to an i64 in memory; returns its former value."""
        place, raw = self._pointer(address), self.raw(value, i64)
        return Value(self, self.builder.atomic_rmw("add", place, raw, "acq_rel"))

    def atomic_load(self, address: Value) -> Value:
        return Value(self, self.builder.load_atomic(self._pointer(address), "acquire", 8, typ=i64))

    def atomic_store(self, address: Value, value: Value | int) -> None:
        self.builder.atomic_rmw("xchg", self._pointer(address), self.raw(value, i64), "acq_rel")

    def compare_exchange(self, address: Value, expected: int, value: int) -> Value:
        """Store `value` in an i64 if it is `expected`; returns whether it was, i32 1 or 0."""
        pair = self.builder.cmpxchg(
            self._pointer(address), i64(expected), i64(value), "acq_rel", "acquire"
        )
        return Value(self, self.builder.zext(self.builder.extract_value(pair, 1), i32))

    def switch(self, number: Value, cases: list[Callable[[], None]]) -> None:
        """Run the code that cases[number] writes; nothing for other numbers."""
        builder = self.builder
        after = builder.append_basic_block()
        choice = builder.switch(number.raw, after)
        for index, case in enumerate(cases):
            block = builder.append_basic_block()
            choice.add_case(i64(index), block)
            builder.position_at_end(block)
            case()
            builder.branch(after)
        builder.position_at_end(after)

    def finish(self) -> Function:
        self.builder.ret_void()
        return self
