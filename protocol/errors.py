"""Errors of the protocol. They say which side broke it."""


class ProtocolError(Exception):
    """One side broke the protocol; the connection is of no further use."""


class LocalProtocolError(ProtocolError):
    """This side tried to do what the protocol forbids: a bug in the caller."""


class RemoteProtocolError(ProtocolError):
    """The peer sent what the protocol forbids; close the connection."""


class UnsupportedTokensError(ValueError):
    """A token id lies outside 0..2**32-1 and cannot be stored (rule N5)."""


class SchemaError(ValueError):
    """A schema or an image description contradicts itself; the message names the tensor."""
