"""Sums over rows of a table of lanes, for compiled loops: a row is taken in vectors, and what is left of it in parts.

Of a few lanes, a compiled loop costs several times more to begin than to run. So these are written in LLVM's language.
From two lanes on each is added up in the order that is written here, however many lie beside it.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from noisecast.compiled import INSIDE, njit, processor_features, wide_vectors

MASKED: bool = "+avx512f" in processor_features()  # loads of part of a vector cost no more than whole ones

_VECTOR, _MOST = 16, 4  # numbers of a vector; vectors of a sum that are in registers at once
_NUMBER, _INDEX, _SHORT = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_NUMBERS = ir.VectorType(_NUMBER, _VECTOR)
_ANYHOW = ("contract", "nsz")  # as `FAST`


# --- What kernels call ------------------------------------------------------------------------------------------------


@njit(**INSIDE)
def add_rows(out, number, table, indices, values, begin, end):
    """out[number] += sum of values[e] * table[indices[e]] over begin <= e < end.

    Args:
      out, table: (numbers, lanes), (rows, lanes) float32.
    """
    wide_vectors()
    if MASKED:
        _add_rows(out, number, table, indices, values, begin, end)
        return
    lanes, entry = table.shape[1], begin
    while entry + 4 <= end:  # the sums are loaded and stored once for four rows
        row_0, row_1, row_2, row_3 = indices[entry], indices[entry + 1], indices[entry + 2], indices[entry + 3]
        x_0, x_1, x_2, x_3 = values[entry], values[entry + 1], values[entry + 2], values[entry + 3]
        for lane in range(lanes):
            z = out[number, lane] + x_0 * table[row_0, lane]
            z += x_1 * table[row_1, lane]
            z += x_2 * table[row_2, lane]
            out[number, lane] = z + x_3 * table[row_3, lane]
        entry += 4
    while entry < end:
        row, value = indices[entry], values[entry]
        for lane in range(lanes):
            out[number, lane] += value * table[row, lane]
        entry += 1


@njit(**INSIDE)
def add_to_rows(table, at, indices, values, begin, end, moves, number):
    """table[at[indices[e]]] += values[e] * moves[number] over begin <= e < end.

    Args:
      at: where in the table each index has its row; None: at its own number.
      moves: (numbers, lanes) float32.
    """
    wide_vectors()
    _add_to_rows(table, at, indices, values, begin, end, moves, number)


@njit(**INSIDE)
def add_product(table, row, scale, factors, moves, number):
    """table[row] += (scale * factors) * moves[number]; factors: (lanes,) float32."""
    wide_vectors()
    _add_product(table, row, scale, factors, moves, number)


# --- The same in LLVM's language --------------------------------------------------------------------------------------


class _Table:
    """An array of float32, contiguous, in rows of `lanes`."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any):
        assert kind.layout == "C"
        array = context.make_array(kind)(context, builder, value)
        self._builder, self._data = builder, array.data
        self.lanes = cgutils.unpack_tuple(builder, array.shape)[-1]

    def row(self, number: Any) -> Any:
        return self._builder.gep(self._data, [self._builder.mul(number, self.lanes)])


def _add_to_rows_in_vectors(typing_context, table, at, indices, values, begin, end, moves, number):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        table, moves = (_Table(context, builder, kinds[i], arguments[i]) for i in (0, 6))
        begin, end, move = arguments[4], arguments[5], moves.row(arguments[7])
        with cgutils.for_range_slice(builder, begin, end, _whole(1), _INDEX) as (entry, _):
            number = _element(context, builder, kinds[2], arguments[2], entry)
            value = _element(context, builder, kinds[3], arguments[3], entry)
            if kinds[1] != types.none:
                number = _element(context, builder, kinds[1], arguments[1], number)

            def added(lane: Any, count: int) -> Any:
                return _times(builder, _in_all(builder, value, count), _load(builder, move, lane, count))

            _add_along(builder, table.row(number), table.lanes, added)
        return context.get_dummy_value()

    numbers = types.int64, types.int64, moves, types.int64
    return types.void(table, at, indices, values, *numbers), generate


def _add_product_in_vectors(typing_context, table, row, scale, factors, moves, number):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        table, factors, moves = (_Table(context, builder, kinds[i], arguments[i]) for i in (0, 3, 4))
        of_lanes, move = factors.row(_whole(0)), moves.row(arguments[5])

        def added(lane: Any, count: int) -> Any:
            scaled = _times(builder, _in_all(builder, arguments[2], count), _load(builder, of_lanes, lane, count))
            return _times(builder, scaled, _load(builder, move, lane, count))

        _add_along(builder, table.row(arguments[1]), table.lanes, added)
        return context.get_dummy_value()

    return types.void(table, types.int64, types.float32, factors, moves, types.int64), generate


def _add_along(builder: Any, row: Any, lanes: Any, added: Callable[[Any, int], Any]) -> None:
    """row[lane] += added(lane, how many numbers): whole vectors, then 8, 4, 2 and 1.

    Not a cut vector: a store through a mask makes loads wait that begin within the whole vector, as the next row's do.
    """

    def add(lane: Any, count: int) -> None:
        place = _place(builder, row, lane, count)
        builder.store(_plus(builder, builder.load(place, align=4), added(lane, count)), place, align=4)

    rest = builder.and_(lanes, _whole(_VECTOR - 1))
    with cgutils.for_range_slice(builder, _whole(0), builder.sub(lanes, rest), _whole(_VECTOR), _INDEX) as (lane, _):
        add(lane, _VECTOR)
    count = _VECTOR // 2
    while count:
        with builder.if_then(builder.icmp_unsigned("!=", builder.and_(lanes, _whole(count)), _whole(0))):
            add(builder.and_(lanes, _whole(-2 * count)), count)
        count //= 2


def _add_rows_in_vectors(typing_context, out, number, table, indices, values, begin, end):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        to, table = (_Table(context, builder, kinds[i], arguments[i]) for i in (0, 2))
        row, begin, end = to.row(arguments[1]), arguments[5], arguments[6]

        def add(first: Any, count: int, mask: Any) -> None:
            """To up to four vectors at once, the last one cut, from lane `first` on."""
            sums = [cgutils.alloca_once(builder, _NUMBERS) for _ in range(count)]
            for place, vector in zip(sums, _cut(builder, row, first, count, mask), strict=True):
                builder.store(vector, place)
            with cgutils.for_range_slice(builder, begin, end, _whole(1), _INDEX) as (entry, _):
                own = table.row(_element(context, builder, kinds[3], arguments[3], entry))
                value = _in_all(builder, _element(context, builder, kinds[4], arguments[4], entry), _VECTOR)
                for place, vector in zip(sums, _cut(builder, own, first, count, mask), strict=True):
                    builder.store(_plus(builder, builder.load(place), _times(builder, value, vector)), place)
            _store_cut(builder, [builder.load(place) for place in sums], row, first, mask)

        lanes, step = table.lanes, _whole(_MOST * _VECTOR)
        with cgutils.for_range_slice(builder, _whole(0), lanes, step, _INDEX) as (first, _):
            left = builder.sub(lanes, first)
            for count in range(1, _MOST + 1):  # code for each
                before = _whole(_VECTOR * (count - 1))
                fits = builder.icmp_unsigned(">", left, before)
                if count < _MOST:
                    fits = builder.and_(fits, builder.icmp_unsigned("<=", left, _whole(_VECTOR * count)))
                with builder.if_then(fits):
                    add(first, count, _first_of(builder, builder.sub(left, before)))
        return context.get_dummy_value()

    return types.void(out, types.int64, table, indices, values, types.int64, types.int64), generate


_add_to_rows: Any = intrinsic(_add_to_rows_in_vectors)
_add_product: Any = intrinsic(_add_product_in_vectors)
_add_rows: Any = intrinsic(_add_rows_in_vectors)


# --- Words of LLVM's language -----------------------------------------------------------------------------------------


def _whole(number: int) -> ir.Constant:
    return ir.Constant(_INDEX, number)


def _times(builder: Any, one: Any, two: Any) -> Any:
    return builder.fmul(one, two, flags=_ANYHOW)


def _plus(builder: Any, one: Any, two: Any) -> Any:
    return builder.fadd(one, two, flags=_ANYHOW)


def _place(builder: Any, row: Any, lane: Any, count: int) -> Any:
    return builder.bitcast(builder.gep(row, [lane]), ir.VectorType(_NUMBER, count).as_pointer())


def _load(builder: Any, row: Any, lane: Any, count: int) -> Any:
    return builder.load(_place(builder, row, lane, count), align=4)


def _element(context: Any, builder: Any, kind: Any, value: Any, at: Any) -> Any:
    """value[at] of a contiguous array; an integer as one of 64 bits."""
    assert kind.layout == "C"
    found = builder.load(builder.gep(context.make_array(kind)(context, builder, value).data, [at]))
    if not isinstance(found.type, ir.IntType) or found.type == _INDEX:
        return found
    return builder.sext(found, _INDEX) if kind.dtype.signed else builder.zext(found, _INDEX)


def _in_all(builder: Any, number: Any, count: int) -> Any:
    """A vector of one number."""
    kind = ir.VectorType(number.type, count)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(_SHORT, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_SHORT, count), [0] * count))


def _first_of(builder: Any, count: Any) -> Any:
    """The mask of a vector's first `count` numbers."""
    numbers = ir.Constant(ir.VectorType(_INDEX, _VECTOR), list(range(_VECTOR)))
    return builder.icmp_unsigned("<", numbers, _in_all(builder, count, _VECTOR))


def _cut(builder: Any, row: Any, lane: Any, count: int, mask: Any) -> list[Any]:
    """`count` vectors of a row, the last one through a mask."""
    vectors = [_load(builder, row, builder.add(lane, _whole(_VECTOR * number)), _VECTOR) for number in range(count - 1)]
    place = _place(builder, row, builder.add(lane, _whole(_VECTOR * (count - 1))), _VECTOR)
    nothing = ir.Constant(_NUMBERS, [0.0] * _VECTOR)
    return [*vectors, _masked(builder, "load", _NUMBERS, place, ir.Constant(_SHORT, 4), mask, nothing)]


def _store_cut(builder: Any, vectors: list[Any], row: Any, lane: Any, mask: Any) -> None:
    places = [
        _place(builder, row, builder.add(lane, _whole(_VECTOR * number)), _VECTOR) for number in range(len(vectors))
    ]
    for vector, place in zip(vectors[:-1], places[:-1], strict=True):
        builder.store(vector, place, align=4)
    _masked(builder, "store", ir.VoidType(), vectors[-1], places[-1], ir.Constant(_SHORT, 4), mask)


def _masked(builder: Any, what: str, result: ir.Type, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.{what}.v{_VECTOR}f32.p0")
    return builder.call(function, arguments)
