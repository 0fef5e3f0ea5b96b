"""Metal kernels on a machine without Metal.

`exported` lists a function's primitives as MLX would hand them to a GPU, with the Metal source of
its kernels (MLX 0.32.4 records them without Metal). `metal_kernel` runs that source: compiled as
C++. Each lane of a SIMD group has a stack of its own and waits at a sum or shuffle for the others.
`compile_as_metal` has clang check that source with Metal's address spaces and without C++ that Metal
lacks.
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

_metal_kernel = mx.fast.metal_kernel
_PRELUDE = """
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#define device
#define constant
typedef unsigned int uint;
typedef _Float16 float16_t;
struct uint3 { uint x, y, z; };
struct bfloat16_t {
    uint16_t bits;
    explicit bfloat16_t(float value) { uint32_t b; memcpy(&b, &value, 4); bits = (b + 0x7fff + ((b >> 16) & 1)) >> 16; }
    explicit operator float() const { uint32_t b = uint32_t(bits) << 16; float value; memcpy(&value, &b, 4); return value; }
};
namespace metal {
using std::exp; using std::log; using std::abs;
static float max(float x, float y) { return x > y ? x : y; }
static float rsqrt(float x) { return 1 / std::sqrt(x); }
}
static ucontext_t group, lanes[32];
static char stacks[32][1 << 16];
static int lane, count, turns[32];
static bool has_ended[32];
static float given[2][32];  // by turn: a lane may be one ahead
static void run_thread();
static float* give(float value) {
  float* values = given[turns[lane]++ % 2];
  values[lane] = value;
  swapcontext(&lanes[lane], &group);
  return values;
}
static float simd_sum(float value) {
  float* values = give(value), sum = 0;
  for (int i = 0; i < count; i++) sum += values[i];
  return sum;
}
static float simd_shuffle_xor(float value, int mask) { return give(value)[lane ^ mask]; }
static void run_lane() { run_thread(); has_ended[lane] = true; }
static void run_group(int size) {
  count = size;
  for (int i = 0; i < size; i++) {
    turns[i] = has_ended[i] = 0;
    getcontext(&lanes[i]);
    lanes[i].uc_stack.ss_sp = stacks[i]; lanes[i].uc_stack.ss_size = sizeof stacks[i]; lanes[i].uc_link = &group;
    makecontext(&lanes[i], run_lane, 0);
  }
  for (int ended = 0; ended < size;)
    for (lane = 0; lane < size; lane++)
      if (!has_ended[lane]) { swapcontext(&group, &lanes[lane]); ended += has_ended[lane]; }
}
"""
# For clang and SPIR-V, whose address spaces 1 to 3 are Metal's and whose default is `thread`. float
# converts to bfloat only explicitly, as in MLX's own type of that name. Metal has no double; its
# keywords are no names.
_DIALECT = """
typedef signed char int8_t; typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned uint32_t, uint;
typedef _Float16 float16_t;
enum class bfloat16_t : uint16_t {};
struct uint3 { uint x, y, z; };
float simd_sum(float); float simd_shuffle_xor(float, uint16_t);
namespace metal { float exp(float); float log(float); float abs(float); float max(float, float); float rsqrt(float); }
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#pragma GCC poison double virtual new delete goto thread_local kernel vertex fragment
"""
_CLANG = (
    "clang -x c++ --target=spir64 -std=c++14 -fno-exceptions -fno-rtti -O2 -fno-vectorize "
    "-fno-slp-vectorize "
    "-Werror -Wdouble-promotion -emit-llvm -S -o - -"
).split()
_LAUNCH = """
static void** a;
static int x, y, z, gx, gy, gz, tx, ty, tz, start;
static void run_thread() {{
  const int i = start + lane;
  const uint3 thread_position_in_grid = {{x + uint(i % tx), y + uint(i / tx % ty), z + uint(i / tx / ty)}};
  const uint3 threadgroup_position_in_grid = {{uint(x / tx), uint(y / ty), uint(z / tz)}};
  const uint thread_index_in_simdgroup = i % 32, simdgroup_index_in_threadgroup = i / 32;
  if (thread_position_in_grid.x < gx && thread_position_in_grid.y < gy && thread_position_in_grid.z < gz)
    {instance}({arguments});
}}
extern "C" void launch(void** pointers, int x0, int y0, int z0, int x1, int y1, int z1) {{
  a = pointers; gx = x0; gy = y0; gz = z0;
  tx = x1 < gx ? x1 : gx; ty = y1 < gy ? y1 : gy; tz = z1 < gz ? z1 : gz;
  for (z = 0; z < gz; z += tz) for (y = 0; y < gy; y += ty) for (x = 0; x < gx; x += tx)
    for (start = 0; start < tx * ty * tz; start += 32) run_group(tx * ty * tz - start < 32 ? tx * ty * tz - start : 32);
}}
"""


def exported(function: Callable, *arrays: mx.array) -> list[dict]:
    """The primitives of function(*arrays), in order: name, arguments, inputs and outputs."""
    seen: list[dict] = []
    mx.export_function(seen.append, function, *arrays)
    return [record for record in seen if record["type"] == "primitive"]


def metal_kernel(name: str, **settings):
    """Stands in for mx.fast.metal_kernel: computes at once, what MLX's own record of the call
    says.
    """
    kernel = _metal_kernel(name=name, **settings)

    def call(*, inputs, **rest):
        records = exported(lambda *arrays: kernel(inputs=list(arrays), **rest), *inputs)
        (record,) = [record for record in records if record["name"] == "CustomKernel"]
        _, source, *sizes, shape_infos = record["arguments"][:9]
        held = [
            np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
            for array in inputs
        ]
        pointers = []
        for array, (has_shape, *_) in zip(held, shape_infos):
            pointers += [array.ctypes.data_as(ctypes.c_void_p)]
            if has_shape:
                shape = (ctypes.c_int * array.ndim)(*array.shape)
                pointers.append(ctypes.cast(shape, ctypes.c_void_p))
        shapes = zip(rest["output_shapes"], rest["output_dtypes"])
        held_as = lambda dtype: mx.uint16 if dtype == mx.bfloat16 else dtype  # noqa: E731
        outputs = [np.array(mx.zeros(shape, held_as(dtype))) for shape, dtype in shapes]
        pointers += [array.ctypes.data_as(ctypes.c_void_p) for array in outputs]
        _compile(source)((ctypes.c_void_p * len(pointers))(*pointers), *map(ctypes.c_int, sizes))
        return [mx.array(array).view(dtype) for array, dtype in zip(outputs, rest["output_dtypes"])]

    return call


def compile_as_metal(source: str) -> str:
    """LLVM's code for a kernel as MLX generates it. Raises ValueError with clang's errors."""
    # C++ has no attributes after `template`, and warns of Metal's.
    done = subprocess.run(
        _CLANG, input=_DIALECT + re.sub(r"\[\[.*?\]\]", "", source), capture_output=True, text=True
    )
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


@functools.cache
def _compile(source: str):
    """The kernel over its whole grid as a C function of pointers, grid and threadgroup. Raises
    RuntimeError as MLX does.
    """
    function, _, instance = source.rstrip().rpartition("template [[host_name(")
    instance = re.search(r"decltype\((.*)\) ", instance)[1]
    parameters = re.search(r"\[\[kernel\]\] void \w+\((.*?)\) \{", function, re.S)[1].split(",\n")
    arguments = []
    for number, parameter in enumerate(parameters):
        kind, name = re.match(r"\s*(.*?)(\w+) \[\[", parameter).groups()
        arguments.append(f"({kind})a[{number}]" if "[[buffer(" in parameter else name)
    folder = Path(tempfile.mkdtemp())
    (folder / "kernel.cpp").write_text(
        _PRELUDE + function + _LAUNCH.format(instance=instance, arguments=", ".join(arguments))
    )
    command = "g++ -std=c++17 -O2 -shared -fPIC -w kernel.cpp -o kernel.so".split()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        words = "[metal::Device] Unable to build metal library from source"
        raise RuntimeError(f"{words}\n{done.stderr[-2000:]}")
    return ctypes.CDLL(str(folder / "kernel.so")).launch
