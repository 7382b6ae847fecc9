"""The schema of each namespace, so that a hit need not send what this process has seen before.

A `SchemaBook` owns its table. It may be used from any thread: an entry is replaced, never changed.
"""

from typing import Final, NamedTuple

import xxhash

from prefixcached.client.errors import ProtocolFailure
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.schema import Schema, decode_schema

MAX_NAMESPACES: Final = 64
"""A process uses a handful of models; beyond that the oldest is asked for again."""


def schema_digest(encoded: bytes) -> bytes:
    """Return the name of an encoded schema: its XXH3-128, 16 bytes."""
    return xxhash.xxh3_128_digest(encoded)


class KnownSchema(NamedTuple):
    """What is known of a namespace; an empty digest where nothing is."""

    digest: bytes
    schema: Schema | None


class SchemaBook:
    """Schemas by namespace."""

    def __init__(self) -> None:
        self._entries: dict[str, KnownSchema] = {}

    def known(self, namespace: str) -> KnownSchema:
        """Return what to name in a request; `resolve` wants the same again."""
        return self._entries.get(namespace, KnownSchema(b"", None))

    def learn(self, namespace: str, encoded: bytes, schema: Schema) -> None:
        """Remember the schema of ``namespace``."""
        self._entries.pop(namespace, None)
        self._entries[namespace] = KnownSchema(schema_digest(encoded), schema)
        for oldest in list(self._entries)[:-MAX_NAMESPACES]:
            self._entries.pop(oldest, None)

    def resolve(self, namespace: str, known: KnownSchema, encoded: bytes) -> Schema:
        """Return the schema of a hit.

        Args:
            namespace: The hit's.
            known: What the request named.
            encoded: What the reply brought; empty where the request named the right one.

        Raises:
            ProtocolFailure: It is no schema, or none was sent though none was known.
        """
        if not encoded:
            if known.schema is None:
                raise ProtocolFailure("the daemon left out a schema that this client lacks")
            return known.schema
        try:
            schema = decode_schema(encoded)
        except SchemaError as error:
            raise ProtocolFailure(f"the daemon sent an unusable schema: {error}") from error
        self.learn(namespace, encoded, schema)
        return schema
