"""LLVM code from Python: functions, values with operators, loops and mutable variables.

An address is an i64, so that address arithmetic reads like arithmetic. Vectors have 16 lanes of 32
bits on every target; LLVM splits them for narrower registers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from llvmlite import ir

LANES = 16  # float32 or int32 lanes of a vector: rows of a panel, positions of a block of keys

i8, i16, i32, i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
f16, f32 = ir.HalfType(), ir.FloatType()


class _BFloatType(ir.HalfType):
    """bfloat16, which llvmlite lacks, to pass vectors to intrinsics; no constants."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


bf16 = _BFloatType()
void, pointer = ir.VoidType(), ir.PointerType()


def vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    """The vector type of `lanes` elements."""
    return ir.VectorType(element, lanes)


f32s, i32s = vector(f32), vector(i32)


def _is_float(type_: ir.Type) -> bool:
    return isinstance(getattr(type_, "element", type_), (ir.FloatType, ir.HalfType))


def _constant(type_: ir.Type, value: int | float | list) -> ir.Constant:
    if isinstance(type_, ir.VectorType) and not isinstance(value, list):
        value = [value] * type_.count
    return ir.Constant(type_, value)


class Module(ir.Module):
    """LLVM code under construction."""

    def __init__(self, name: str = "mlx_llama"):
        super().__init__(name)
        self.kernels: dict[tuple, Function] = {}  # written so far, see `kernel`


def kernel(write: Callable[..., Function]) -> Callable[..., Function]:
    """Make write(module, ...) return the function that it wrote to this module before for the same
    arguments, `public` aside.
    """
    signature = inspect.signature(write)

    @functools.wraps(write)
    def write_once(module: Module, *arguments, **options) -> Function:
        bound = signature.bind(module, *arguments, **options)
        bound.apply_defaults()
        values = [
            value for name, value in bound.arguments.items() if name not in ("module", "public")
        ]
        key = (write, *values)
        if key not in module.kernels:
            module.kernels[key] = write(module, *arguments, **options)
        return module.kernels[key]

    return write_once


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

    def _binary(self, other: Value | int | float, integer: str, floating: str = "") -> Value:
        name = floating if _is_float(self.type) else integer
        return Value(
            self.function,
            getattr(self.function.builder, name)(self.raw, self.function.raw(other, self.type)),
        )

    def __add__(self, other):
        return self._binary(other, "add", "fadd")

    def __sub__(self, other):
        return self._binary(other, "sub", "fsub")

    def __mul__(self, other):
        return self._binary(other, "mul", "fmul")

    def __truediv__(self, other):
        return self._binary(other, "", "fdiv")

    def __floordiv__(self, other):
        return self._binary(other, "udiv")

    def __mod__(self, other):
        return self._binary(other, "urem")

    def __and__(self, other):
        return self._binary(other, "and_")

    def __or__(self, other):
        return self._binary(other, "or_")

    def __xor__(self, other):
        return self._binary(other, "xor")

    def __lshift__(self, other):
        return self._binary(other, "shl")

    def __rshift__(self, other):
        return self._binary(other, "lshr")

    __radd__, __rmul__ = __add__, __mul__

    def arithmetic_shift(self, bits: int) -> Value:
        """Shift right, keeping the sign."""
        return self._binary(bits, "ashr")

    def compare(self, operator: str, other: Value | int | float) -> Value:
        """Compare as signed integers or ordered floats: "<", "<=", ">", ">=", "==", "!="."""
        builder = self.function.builder
        comparison = builder.fcmp_ordered if _is_float(self.type) else builder.icmp_signed
        return Value(
            self.function, comparison(operator, self.raw, self.function.raw(other, self.type))
        )

    def select(self, yes: Value, no: Value | int | float) -> Value:
        """`yes` where this condition holds, else `no`."""
        return Value(
            self.function,
            self.function.builder.select(self.raw, yes.raw, self.function.raw(no, yes.type)),
        )

    def minimum(self, other: Value | int) -> Value:
        """The smaller of two signed integers."""
        other = Value(self.function, self.function.raw(other, self.type))
        return self.compare("<", other).select(self, other)

    def sign_extend(self, type_: ir.Type) -> Value:
        """Widen signed integers."""
        return self._cast("sext", type_)

    def zero_extend(self, type_: ir.Type) -> Value:
        """Widen unsigned integers."""
        return self._cast("zext", type_)

    def truncate(self, type_: ir.Type) -> Value:
        """Keep the low bits of integers."""
        return self._cast("trunc", type_)

    def bitcast(self, type_: ir.Type) -> Value:
        """Reinterpret the bits as another type."""
        return self._cast("bitcast", type_)

    def to_float(self) -> Value:
        """Convert int32 to float32, rounding to nearest."""
        return self._cast(
            "sitofp", vector(f32, self.type.count) if isinstance(self.type, ir.VectorType) else f32
        )

    def to_int(self) -> Value:
        """Convert float32 to int32, rounding towards zero."""
        return self._cast("fptosi", i32s if isinstance(self.type, ir.VectorType) else i32)

    def widen_half(self) -> Value:
        """Convert float16 to float32, exactly."""
        return self._cast(
            "fpext", vector(f32, self.type.count) if isinstance(self.type, ir.VectorType) else f32
        )

    def narrow_half(self) -> Value:
        """Convert float32 to float16, rounding to nearest."""
        return self._cast(
            "fptrunc", vector(f16, self.type.count) if isinstance(self.type, ir.VectorType) else f16
        )

    def _cast(self, name: str, type_: ir.Type) -> Value:
        return Value(self.function, getattr(self.function.builder, name)(self.raw, type_))

    def splat(self, lanes: int = LANES) -> Value:
        """Broadcast to all lanes of a vector."""
        builder, type_ = self.function.builder, vector(self.type, lanes)
        empty = ir.Constant(type_, ir.Undefined)
        first = builder.insert_element(empty, self.raw, i32(0))
        return Value(
            self.function,
            builder.shuffle_vector(first, empty, ir.Constant(vector(i32, lanes), [0] * lanes)),
        )

    def extract_lane(self, index: int) -> Value:
        return Value(self.function, self.function.builder.extract_element(self.raw, i32(index)))

    def insert_lane(self, index: int, value: Value) -> Value:
        return Value(
            self.function, self.function.builder.insert_element(self.raw, value.raw, i32(index))
        )

    def shuffle(self, lanes: list[int], other: Value | None = None) -> Value:
        """Select lanes by number, counting the lanes of `other` after this vector's."""
        other = self if other is None else other
        mask = ir.Constant(vector(i32, len(lanes)), lanes)
        return Value(self.function, self.function.builder.shuffle_vector(self.raw, other.raw, mask))


def concatenate(parts: list[Value]) -> Value:
    """Concatenate the lanes of 1, 2 or 4 vectors."""
    while len(parts) > 1:
        lanes = list(range(2 * parts[0].type.count))
        parts = [low.shuffle(lanes, high) for low, high in zip(parts[::2], parts[1::2])]
    return parts[0]


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
    """A function under construction. Parameters are attributes: `f.out` of Function(module, "name",
    {"out": i64}).
    """

    def __init__(
        self,
        module: Module,
        name: str,
        parameters: Mapping[str, ir.Type],
        result: ir.Type = void,
        public: bool = False,
    ):
        self.module = module
        self.ir = ir.Function(module, ir.FunctionType(result, list(parameters.values())), name)
        self.ir.attributes.add("nounwind")
        if not public:
            self.ir.linkage = "internal"
            self.ir.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.ir.append_basic_block("entry"))
        self.parameters = {key: Value(self, raw) for key, raw in zip(parameters, self.ir.args)}

    def __getattr__(self, name: str) -> Value:
        try:
            return self.__dict__["parameters"][name]
        except KeyError:
            raise AttributeError(name) from None

    def raw(self, value: Value | int | float, type_: ir.Type) -> ir.Value:
        """The LLVM value of a Value or a Python number."""
        return value.raw if isinstance(value, Value) else _constant(type_, value)

    def constant(self, type_: ir.Type, value: int | float | list) -> Value:
        return Value(self, _constant(type_, value))

    def zero(self, type_: ir.Type) -> Value:
        return self.constant(type_, 0.0 if _is_float(type_) else 0)

    def load(
        self, type_: ir.Type, address: Value, offset: Value | int = 0, align: int = 1
    ) -> Value:
        return Value(
            self, self.builder.load(self._pointer(address, offset), align=align, typ=type_)
        )

    def load_word(self, record: Value, index: int) -> Value:
        """Load word `index`, int64, of a record."""
        return self.load(i64, record, 8 * index, 8)

    def load_as_float32(
        self, dtype: str, address: Value, offset: Value | int = 0, lanes: int = LANES
    ) -> Value:
        """Load `lanes` numbers of a dtype, "float32", "float16" or "bfloat16"."""
        if dtype == "float32":
            return self.load(vector(f32, lanes), address, offset, 4)
        if dtype == "float16":
            return self.load(vector(f16, lanes), address, offset, 2).widen_half()
        # bfloat16 is the upper half of a float32.
        half = self.load(vector(i16, lanes), address, offset, 2)
        return (half.zero_extend(vector(i32, lanes)) << 16).bitcast(vector(f32, lanes))

    def allocate_stack(self, nbytes: int) -> Value:
        """Allocate on the stack; returns the address."""
        with self.builder.goto_entry_block():
            memory = self.builder.alloca(vector(i8, nbytes))
        return Value(self, self.builder.ptrtoint(memory, i64))

    def store(self, value: Value, address: Value, offset: Value | int = 0, align: int = 1) -> None:
        self.builder.store(value.raw, self._pointer(address, offset), align=align)

    def prefetch(self, address: Value, nbytes: int, level: int = 2) -> None:
        """Prefetch lines into the cache of a level, 1 or 2; 0: into the first for a single use,
        bypassing the others.
        """
        name = "llvm.prefetch.p0"
        flags = [i32(0), i32(4 - level if level else 0), i32(1)]  # to read, locality, data
        declared = self.module.globals.get(name) or ir.Function(
            self.module, ir.FunctionType(void, [pointer, i32, i32, i32]), name
        )
        for line in range(0, nbytes, 64):
            self.builder.call(declared, [self._pointer(address, line), *flags])

    def _pointer(self, address: Value, offset: Value | int = 0) -> ir.Value:
        if not (isinstance(offset, int) and offset == 0):
            address = address + offset
        return self.builder.inttoptr(address.raw, pointer)

    def call(self, function: Function, *arguments: Value | int | float) -> Value:
        raws = [
            self.raw(value, type_)
            for value, type_ in zip(arguments, function.ir.function_type.args, strict=True)
        ]
        return Value(self, self.builder.call(function.ir, raws))

    def call_address(self, address: Value, types: list[ir.Type], *arguments: Value) -> None:
        """Call the function without a result at an address."""
        callee = self.builder.inttoptr(address.raw, ir.FunctionType(void, types).as_pointer())
        self.builder.call(callee, [value.raw for value in arguments])

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

    def math(self, name: str, *arguments: Value) -> Value:
        """Call llvm.<name> on float32 vectors or numbers: sqrt, fabs, rint."""
        type_ = arguments[0].type
        suffix = f"v{type_.count}f32" if isinstance(type_, ir.VectorType) else "f32"
        return self.intrinsic(f"llvm.{name}.{suffix}", type_, *arguments)

    def exp(self, x: Value) -> Value:
        """exp of 16 floats within 2 ulps, by Cephes' polynomial (Moshier, expf.c)."""

        def real(number: float) -> Value:
            return self.constant(f32s, float(np.float32(number)))

        x = self.smaller(self.larger(x, -87.0), 88.0)
        n = self.math("rint", x * real(1.44269504))
        r = self.fma(n, real(-0.693359375), x)
        r = self.fma(n, real(2.12194440e-4), r)
        p = real(1.9875691500e-4)
        for c in (
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        ):
            p = self.fma(p, r, real(c))
        y = self.fma(p, r * r, r) + real(1.0)
        return y * ((n.to_int() + 127) << 23).bitcast(f32s)

    def reduce_max(self, values: Value) -> Value:
        """The largest lane of a float32 (without NaN) or signed int32 vector."""
        if not _is_float(values.type):
            return self.intrinsic("llvm.vector.reduce.smax.v16i32", i32, values)
        for lanes in self._halves():  # LLVM's reduction of floats is sequential
            values = self.larger(*(values.shuffle(half) for half in lanes))
        return values.extract_lane(0)

    def reduce_sum(self, values: Value) -> Value:
        """The sum of the lanes. float32 is summed in pairwise halves, the same order on every
        target.
        """
        if not _is_float(values.type):
            return self.intrinsic("llvm.vector.reduce.add.v16i32", i32, values)
        for low, high in self._halves():
            values = values.shuffle(low) + values.shuffle(high)
        return values.extract_lane(0)

    @staticmethod
    def _halves() -> Iterator[tuple[list[int], list[int]]]:
        """Lanes of the halves of a vector, then of one half's halves, down to one lane each."""
        width = LANES
        while width > 1:
            width //= 2
            yield list(range(width)), list(range(width, 2 * width))

    def larger(self, a: Value, b: Value | float) -> Value:
        """The larger of two floats, lane by lane; b if either is NaN. One instruction, unlike
        llvm.maxnum.
        """
        b = Value(self, self.raw(b, a.type))
        return a.compare(">", b).select(a, b)

    def smaller(self, a: Value, b: Value | float) -> Value:
        """The smaller of two floats, lane by lane; b if either is NaN."""
        b = Value(self, self.raw(b, a.type))
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

    @contextmanager
    def if_then(self, condition: Value) -> Iterator[None]:
        with self.builder.if_then(condition.raw):
            yield

    @contextmanager
    def if_else(self, condition: Value) -> Iterator[tuple]:
        """Branch: `with f.if_else(c) as (yes, no):`, then `with yes:` and `with no:`."""
        with self.builder.if_else(condition.raw) as branches:
            yield branches

    def atomic_add(self, address: Value, value: Value | int) -> Value:
        """Add to an i64 in memory; returns its former value."""
        return Value(
            self,
            self.builder.atomic_rmw("add", self._pointer(address), self.raw(value, i64), "acq_rel"),
        )

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

    def finish(self, result: Value | None = None) -> Function:
        """End the function."""
        self.builder.ret_void() if result is None else self.builder.ret(result.raw)
        return self
