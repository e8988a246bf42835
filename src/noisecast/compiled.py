"""How kernels are compiled, where their arrays begin, and two hints that Numba has no name for: ask the memory for a
line early, and use all of the processor's width. None of it changes a value.
"""

# ruff: noqa: E402
import hashlib
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

# Files whose text is compiled, or is a constant of what is.
_SOURCES = ("compiled.py", "engines/_*.py", "privacy/*_noise.py", "runners/moments/factorization*.py")
_SOURCES += ("runners/moments/runs.py",)


def source_files() -> list[Path]:
    """Files whose change makes all compiled code stale."""
    package = Path(__file__).parent
    return sorted(path for pattern in _SOURCES for path in package.glob(pattern))


# Before Numba is imported, which takes long enough for an update to land: code that was read before its hash was taken
# would be kept for ever; code that is read after it, until the next change at most.
_SOURCES_HASH = hashlib.sha256(b"\0".join(path.read_bytes() for path in source_files())).digest()

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numpy.typing import ArrayLike, DTypeLike, NDArray

# What float rounding is allowed: contraction and signs of zero, never "no infinities": clipping tests for them.
FAST: Any = {"fastmath": {"contract", "nsz", "arcp"}, "error_model": "numpy", "nogil": True, "cache": True}
# Of a piece that compiled code alone calls: what Python would call it by takes longer to compile than itself. Two
# things in it take seconds more: a counter that begins as 0 and is passed on (what takes it is compiled for the
# literal, too; np.int64(0) has one type), and an array assigned to a slice (compiled code writes its error's text).
INSIDE: Any = FAST | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
# Of a small piece that loops should vectorise over. LLVM puts it in its place; Numba's own `inline="always"` copies
# statements before types are known, and takes long for those that hold many others.
INLINE: Any = {option: INSIDE[option] for option in INSIDE if option != "cache"} | {"forceinline": True}


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba.njit whose compiled code is kept until a file that kernels are made of changes.

    Numba looks at the file of the kernel that is called, and would keep it after an update that changed only a piece
    it calls from another file: a mended kernel that does not run. Where no folder can be written to, Numba refuses to
    compile at all; here code is compiled anew by every process, and a warning says so.
    """
    plain: Any = numba.njit

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            kernel = plain(**options)(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            _say_that_nothing_is_kept()
            return plain(**options | {"cache": False})(function)
        if options.get("cache") and isinstance(kernel, Dispatcher):
            _keep_until_sources_change(kernel)
        return kernel

    return decorate


@cache
def _say_that_nothing_is_kept() -> None:
    warnings.warn(
        "no folder for compiled code can be written to, so every process compiles anew, for up to a minute; "
        "set NUMBA_CACHE_DIR to a folder that can",
        RuntimeWarning,
        stacklevel=1,
    )


def _keep_until_sources_change(kernel: Any) -> None:
    index = kernel._cache._cache_file  # private: Numba's public hook, its locators, would hold for all of a program
    index._source_stamp = (index._source_stamp, _SOURCES_HASH)


def processor_features() -> set[str]:
    """What Numba compiles for: LLVM's names of what an x86 processor can do; of others, none."""
    target: Any = cpu_target.target_context
    machine, _, features = target.codegen().magic_tuple()
    return set(features.split(",")) if machine.startswith("x86_64") else set()


def processor_name() -> str:
    """LLVM's name of the processor that Numba compiles for: "znver4", "sapphirerapids", "generic"."""
    target: Any = cpu_target.target_context
    return target.codegen().magic_tuple()[1]


_READ, _INTO_SECOND_LEVEL, _DATA = 0, 2, 1  # as llvm.prefetch counts them
_WIDE = '"prefer-vector-width"="512"'

_LINE = 64  # bytes of the cache, and of the widest vector


def aligned_zeros(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """np.zeros that begins a line of the cache.

    NumPy begins large arrays 16 bytes behind one, and then every vector of 64 bytes lies in two lines and costs two
    loads.

    >>> aligned_zeros((3, 64)).ctypes.data % 64
    0
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + _LINE, np.uint8)
    begin = -memory.ctypes.data % _LINE
    return memory[begin : begin + size].view(dtype).reshape(shape)


def aligned(values: ArrayLike) -> NDArray[Any]:
    """A copy, contiguous, that begins a line of the cache."""
    values = np.asarray(values)
    copy = aligned_zeros(values.shape, values.dtype)
    copy[...] = values
    return copy


def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """prefetch(array, index): start to load the cache line of array[index]; array has one axis, and is contiguous.

    An index out of range does no harm.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        instruction = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        hints = [ir.Constant(number, hint) for hint in (_READ, _INTO_SECOND_LEVEL, _DATA)]
        builder.call(instruction, [address, *hints])
        return context.get_dummy_value()

    return types.void(array, index), generate


def _wide_vectors(typing_context: Any) -> Any:
    """wide_vectors(): loops of the function that says so run along vectors of 512 bits where the processor has them.

    LLVM keeps to 256 bits on every such processor, for the sake of the first ones, whose clock fell with 512.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # As `set`'s own method: llvmlite's refuses attributes that it has no list of, but writes out what it holds.
        set.add(builder.function.attributes, _WIDE)
        return context.get_dummy_value()

    return types.void(), generate


prefetch: Any = intrinsic(_prefetch)
wide_vectors: Any = intrinsic(_wide_vectors)
