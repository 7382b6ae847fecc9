"""Every limit of the protocol, each with its reason. Both sides enforce them."""

from typing import Final

MEBIBYTE: Final = 1 << 20

PROTOCOL_VERSION: Final = (1, 0)
"""Major, minor. A different major cannot talk; a newer minor only adds fields and messages."""

MAX_TOKENS: Final = 1 << 21
"""Tokens in one prompt: twice the longest context any mlx-lm model accepts today, 8 MiB packed."""

MAX_FRAME_BYTES: Final = 16 * MEBIBYTE
"""One frame's body. The largest legal message is an Offer of MAX_TOKENS with its schema."""

MAX_NAMESPACE_BYTES: Final = 512
"""UTF-8 bytes of a namespace: room for a digest and a readable salt, small enough to log."""

MAX_LABEL_BYTES: Final = 512
"""UTF-8 bytes of a label (a session name)."""

MAX_KEY_BYTES: Final = 512
"""UTF-8 bytes of an object's key."""

MAX_SCHEMA_BYTES: Final = MEBIBYTE
"""An encoded schema: 128 layers of a nested cache take about 60 KiB."""

MAX_METADATA_BYTES: Final = 4 * MEBIBYTE
"""Opaque metadata of a checkpoint or object (JSON of plain values), never tensors."""

MAX_REPLACED: Final = 16
"""Earlier images of one key that a file names: the older ones are gone long since."""

MAX_TENSORS: Final = 8192
"""Tensors in a schema or a snapshot: 128 layers with 64 tensors each."""

MAX_WINDOW_GROUPS: Final = 64
"""Distinct window geometries in one model."""

MAX_NAME_CHARACTERS: Final = 256
"""Of a tensor."""

MAX_DIMENSIONS: Final = 8
"""Dimensions of one tensor."""

MAX_IMAGES_PER_PUT: Final = 4096
"""Images of one put: 512 GiB at the default segment size."""

MAX_DESCRIPTORS: Final = 16
"""Descriptors on one frame: macOS sockets reject larger sets once the peer lags."""

MAX_NESTING: Final = 12
"""Depth of msgpack containers in a frame; a Hit with window rows has 8, a report may have more."""

MAX_VALUES: Final = 1 << 18
"""Values in a frame. A Hit of MAX_IMAGES_PER_PUT parts and MAX_TENSORS snapshot tensors has fewer;
more would let 16 MiB of bytes become a gigabyte of objects."""

SEGMENT_MAX_BYTES: Final = 128 * MEBIBYTE
"""Default upper bound of one segment image: large enough to stream, small enough to evict."""

MAX_LISTED: Final = 4096
"""Images in one listing: more than anybody reads, and a fifth of MAX_VALUES."""

MAX_CONTINUATIONS: Final = 4
"""Held continuations that an explanation shows where a prompt leaves what is held."""

MAX_CONTINUATION_TOKENS: Final = 32
"""Tokens of each: enough to recognise the text."""

MAX_WATCHED: Final = 512
"""Clients, claims or labels in one report of what goes on: as many as connections by default."""

MAX_LATENCY_BOUNDS: Final = 128
"""Buckets of a latency histogram: ten a decade from a microsecond to hours fit."""

MAX_HISTORY_ROWS: Final = 3600
"""Rows of one history report: an hour of seconds, the most that the daemon keeps."""

MAX_HISTORY_SERIES: Final = 128
"""Columns of the history: with MAX_HISTORY_ROWS a quarter of a frame."""

PAGE_BYTES: Final = 16384
"""Allocation unit that budgets round up to: the page of Apple silicon, a multiple of Linux's."""

WINDOW_EXTRA_ROWS: Final = 256
"""Rows beyond what a window needs that are stored when the client still has them (rule T13)."""
