"""Asking the memory for a line before it is needed: the one instruction that Numba has no name for."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_READ, _INTO_SECOND_LEVEL, _DATA = 0, 2, 1  # as llvm.prefetch counts them


def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """prefetch(array, index): start to load the cache line of array[index]; array has one axis, and is contiguous.

    A hint: it changes no value, and an index out of range does no harm.
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


prefetch: Any = intrinsic(_prefetch)
