"""Where each tensor lies in an image: both sides compute the same, or refuse the same."""

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcached.protocol import limits
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.image import (
    ImageKind,
    ImageSpec,
    StateTensor,
    WindowRows,
    allocated_bytes,
    layout,
    segment_lengths,
)
from prefixcached.protocol.schema import ITEM_BYTES, Kind, Schema, TensorSpec, Window

KEYS = TensorSpec("keys", Kind.APPEND, "BF16", (1, 4, 64), axis=2)
RING = TensorSpec("ring", Kind.WINDOW, "F32", (1, 2, 8), axis=2, window=0)
SCHEMA = Schema((KEYS, RING), (Window(8, keep=2),), has_state=True)
STATE = StateTensor("conv", "F16", (1, 3, 5))
ROWS = (WindowRows(((0, 2), (95, 100))),)


def test_rows_of_a_window_say_how_many_they_are() -> None:
    """T13: sinks and newest rows are counted together."""
    assert ROWS[0].count == 7
    assert WindowRows().count == 0
    assert WindowRows().phase == -1, "in temporal order"


def test_a_segment_has_its_slices_and_then_its_rows() -> None:
    """P2: tensors stand in schema order without gaps, each with its own shape and positions."""
    found = layout(SCHEMA, ImageSpec(ImageKind.SEGMENT, 90, 100, ROWS))
    keys, ring = found.extents
    assert (keys.name, keys.dtype, keys.shape, keys.spec) == ("keys", "BF16", (1, 4, 10, 64), KEYS)
    assert (keys.offset, keys.nbytes, keys.ranges) == (0, 4 * 10 * 64 * 2, ((90, 100),))
    assert (ring.name, ring.shape, ring.spec) == ("ring", (1, 2, 7, 8), RING)
    assert (ring.offset, ring.nbytes, ring.ranges) == (keys.nbytes, 2 * 7 * 8 * 4, ROWS[0].ranges)
    assert found.nbytes == keys.nbytes + ring.nbytes


def test_a_segment_in_the_middle_of_a_put_has_slices_alone() -> None:
    """P2: window rows stand with the last segment only."""
    found = layout(SCHEMA, ImageSpec(ImageKind.SEGMENT, 0, 10))
    assert [extent.name for extent in found.extents] == ["keys"]


def test_a_checkpoint_has_its_rows_and_its_snapshot() -> None:
    """A put without new slices leaves its rows with the checkpoint."""
    found = layout(SCHEMA, ImageSpec(ImageKind.CHECKPOINT, 100, 100, ROWS, (STATE,)))
    ring, state = found.extents
    assert ring.name == "ring"
    assert (state.name, state.shape, state.spec, state.ranges) == ("conv", (1, 3, 5), None, ())
    assert (state.offset, state.nbytes) == (ring.nbytes, 1 * 3 * 5 * 2)
    assert found.nbytes == state.offset + state.nbytes


def test_an_object_has_its_tensors_alone() -> None:
    """O1: no schema, no tokens."""
    other = StateTensor("other", "U8", (3,))
    found = layout(None, ImageSpec(ImageKind.OBJECT, tensors=(STATE, other)))
    assert [(e.name, e.offset, e.nbytes) for e in found.extents] == [
        ("conv", 0, 30),
        ("other", 30, 3),
    ]
    assert found.nbytes == 33


@pytest.mark.parametrize(
    ("schema", "spec", "complaint"),
    [
        (SCHEMA, ImageSpec(ImageKind.SEGMENT, 10, 9), "ends at 9 before it starts at 10"),
        (SCHEMA, ImageSpec(ImageKind.CHECKPOINT, 9, 10), "stands at one position"),
        (None, ImageSpec(ImageKind.OBJECT, 0, 1), "stands at one position"),
        (SCHEMA, ImageSpec(ImageKind.SEGMENT, 0, 1, (), (STATE,)), "belong to a checkpoint"),
        (SCHEMA, ImageSpec(ImageKind.SEGMENT, 0, 9, ROWS * 2), "2 window groups .* has 1"),
        (
            msgspec.structs.replace(SCHEMA, windows=(Window(8), Window(4))),
            ImageSpec(ImageKind.SEGMENT, 0, 100, ROWS),
            "1 window groups .* has 2",
        ),
        (None, ImageSpec(ImageKind.OBJECT, windows=ROWS), "1 window groups .* has 0"),
        (
            SCHEMA,
            ImageSpec(ImageKind.CHECKPOINT, tensors=(msgspec.structs.replace(STATE, dtype="X"),)),
            "unknown dtype 'X'",
        ),
        (
            None,
            ImageSpec(
                ImageKind.OBJECT, tensors=(msgspec.structs.replace(STATE, name="__metadata__"),)
            ),
            "reserved",
        ),
        (None, ImageSpec(ImageKind.OBJECT, tensors=(STATE, STATE)), "'conv' appears twice"),
        (
            SCHEMA,
            ImageSpec(ImageKind.CHECKPOINT, tensors=(msgspec.structs.replace(STATE, name="keys"),)),
            "'keys' appears twice",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_description_that_contradicts_itself_has_no_layout(
    schema: Schema | None, spec: ImageSpec, complaint: str
) -> None:
    """C3: lying sizes and names are refused before any byte is reserved for them."""
    with pytest.raises(SchemaError, match=complaint):
        layout(schema, spec)


@pytest.mark.parametrize(
    ("ranges", "legal"),
    [
        (((0, 10),), True),
        (((0, 1), (1, 10)), True),
        (((9, 10),), True),
        (((0, 11),), False),
        (((-1, 1),), False),
        (((3, 3),), False),
        (((5, 4),), False),
        (((4, 6), (0, 2)), False),
        (((0, 5), (4, 6)), False),
    ],
)
def test_rows_are_sorted_ranges_within_the_image(
    ranges: tuple[tuple[int, int], ...], legal: bool
) -> None:
    """C3: rows beyond the image's end, twice, empty or out of order are no rows."""
    spec = ImageSpec(ImageKind.SEGMENT, 0, 10, (WindowRows(ranges),))
    if legal:
        assert layout(SCHEMA, spec).extents[1].ranges == ranges
    else:
        with pytest.raises(SchemaError, match="not sorted disjoint ranges below 10"):
            layout(SCHEMA, spec)


@given(
    start=st.integers(0, 500),
    total=st.integers(-3, 500),
    token_items=st.integers(0, 64),
    max_bytes=st.integers(1, 4096),
)
def test_a_long_put_is_cut_into_even_segments(
    start: int, total: int, token_items: int, max_bytes: int
) -> None:
    """DESIGN 3: each fits the limit, they follow one another, and none is a sliver."""
    schema = Schema((TensorSpec("x", Kind.APPEND, "F32", (token_items,), axis=0),))
    pieces = segment_lengths(schema, start, start + total, max_bytes)
    if total <= 0:
        assert pieces == []
        return
    assert (pieces[0][0], pieces[-1][1]) == (start, start + total)
    assert all(left[1] == right[0] for left, right in pairwise(pieces))
    lengths = [end - begin for begin, end in pieces]
    # A token that is larger than the limit is a segment of its own.
    most = max(1, max_bytes // (4 * token_items)) if token_items else total
    assert max(lengths) <= most
    assert max(lengths) - min(lengths) <= 1
    assert len(pieces) == math.ceil(total / most)


def test_an_image_is_charged_in_whole_pages() -> None:
    """E1: budgets count what the system allocates."""
    page = limits.PAGE_BYTES
    charged = [allocated_bytes(nbytes) for nbytes in (0, 1, page - 1, page, page + 1)]
    assert charged == [0, page, page, page, 2 * page]


def test_a_snapshot_takes_the_bytes_of_its_items() -> None:
    """A tensor without dimensions is one item, one with a 0 among them none."""
    assert StateTensor("x", "F64", ()).nbytes == ITEM_BYTES["F64"]
    assert StateTensor("x", "F64", (4, 0)).nbytes == 0


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        ({"start": 0}, {"start": -1}),
        ({"start": 1 << 40, "end": 1 << 40}, {"start": 1 << 40, "end": (1 << 40) + 1}),
        ({"windows": [{"phase": -1}]}, {"windows": [{"phase": -2}]}),
        ({"windows": [{"phase": 1 << 40}]}, {"windows": [{"phase": (1 << 40) + 1}]}),
        (
            {"end": 17, "windows": [{"ranges": [[at, at + 1] for at in range(16)]}]},
            {"end": 17, "windows": [{"ranges": [[at, at + 1] for at in range(17)]}]},
        ),
    ],
    ids=["start", "end", "first phase", "last phase", "ranges"],
)
def test_a_description_is_held_to_exactly_its_limits(
    within: dict[str, object], beyond: dict[str, object]
) -> None:
    """C3: what docs/protocol.md allows has a layout, and the next value is no description."""
    kind = {"kind": "segment"}
    spec = msgspec.convert(kind | within, ImageSpec)
    assert layout(SCHEMA, spec).nbytes >= 0
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(kind | beyond, ImageSpec)


def test_a_description_and_its_layout_cannot_be_changed() -> None:
    """L2: whoever was told where the bytes of an image lie may keep that."""
    spec = ImageSpec(ImageKind.CHECKPOINT, 100, 100, ROWS, (STATE,))
    found = layout(SCHEMA, spec)
    parts: tuple[tuple[msgspec.Struct, str], ...] = (
        (spec, "end"), (ROWS[0], "phase"), (STATE, "dtype"), (found, "nbytes"),
        (found.extents[0], "offset"),
    )  # fmt: skip
    for part, field in parts:
        with pytest.raises(AttributeError):
            setattr(part, field, 1)
