"""LoadDesk: the index from file headers at start-up. Part of RamTier, pure. Rules D5, D8, D10.

Files arrive in any order. A segment attaches when its parent is known, a checkpoint when its
tokens lead to a segment; what is left at the end is unattached and goes first when space is short.
The scan has compared each file's size with its schema, so no layout is computed here.
"""

import xxhash

from prefixcached.actors import tree
from prefixcached.actors.desk import Shared
from prefixcached.actors.entries import (
    Checkpoint,
    Entry,
    Namespace,
    ObjectEntry,
    Segment,
    entries_below,
)
from prefixcached.protocol.actor_messages import DeleteFile, FileEntry, Loaded
from prefixcached.protocol.errors import SchemaError
from prefixcached.protocol.image import ImageKind
from prefixcached.protocol.schema import Schema, decode_schema
from prefixcached.protocol.tokens import TokenArray, common_prefix_length, token_array


class LoadDesk:
    """Owns the files that have been found and not placed yet."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._index = shared.index
        self._orphans: dict[tuple[str, str], list[FileEntry]] = {}
        self._checkpoints: list[FileEntry] = []
        self._schemas: dict[str, bytes] = {}
        self._now_wall_seconds = 0.0
        self._cleared: set[str] = set()
        self._all_cleared = False
        self.is_complete = False
        """Whether all files have been found; a failing disk lets RamTier serve before that."""
        self.loaded = 0
        self.damaged = 0
        self.duplicates = 0
        self.unattached = 0

    def loaded_batch(self, batch: Loaded, now_wall_seconds: float) -> None:
        """Place a batch; ``now_wall_seconds`` is the wall clock that file times are compared to."""
        self._now_wall_seconds = now_wall_seconds
        self._schemas.update(batch.schemas)
        self.damaged += batch.damaged
        for file in batch.entries:
            if self._all_cleared or file.header.namespace in self._cleared:
                continue  # found before it was cleared: already out of reach (rule D11)
            self._place_any(file)
        if not batch.done:
            return
        if not batch.later:
            # What an earlier scan could not place, since it broke off before it found the parents.
            for file in self._index.take_unattached():
                self.unattached -= 1
                self._place_any(file)
        for file in self._checkpoints:
            self._place_checkpoint(file)
        for files in self._orphans.values():
            for file in files:
                self._leave_unattached(file)
        self._orphans, self._checkpoints = {}, []
        if not batch.later:
            self._schemas.clear()
            self._cleared, self._all_cleared = set(), False
            self.is_complete = True
        for namespace in list(self._index.namespaces.values()):
            self._index.forget_if_empty(namespace)  # all its files may be unattached
        self._index.set_other_bytes(batch.foreign_bytes + batch.quarantine_bytes)
        self._shared.eviction.make_room_on_disk(
            0
        )  # the directory may have been over its cap (rule D5)

    def clear(self, namespace: str | None) -> None:
        """Forget what was found of a namespace (all when None), and what is still to be found.

        Nothing new can be among that: nothing is written before the scan is over.
        """
        if namespace is None:
            self._all_cleared = True
            self._orphans, self._checkpoints = {}, []
        else:
            self._cleared.add(namespace)
            self._orphans = {k: v for k, v in self._orphans.items() if k[0] != namespace}
            self._checkpoints = [f for f in self._checkpoints if f.header.namespace != namespace]

    def _place_any(self, file: FileEntry) -> None:
        if file.header.kind is ImageKind.CHECKPOINT:
            self._checkpoints.append(file)
        elif file.header.kind is ImageKind.SEGMENT:
            self._place(file)
        else:
            self._place_object(file)

    def _place(self, file: FileEntry) -> None:
        """Attach a segment and whatever waited for it, if its own parent is known."""
        ready = [file]
        while ready:
            file = ready.pop()
            is_top = not file.header.parent
            namespace = self._namespace(file) if is_top else self._known_namespace(file)
            parent = None if namespace is None else self._parent(namespace, file)
            if is_top and namespace is None:
                self._leave_unattached(file)
            elif namespace is None or parent is None:
                key = (file.header.namespace, file.header.parent)
                self._orphans.setdefault(key, []).append(file)
            elif self._attach(namespace, parent, file):
                ready += self._orphans.pop((file.header.namespace, file.header.id), [])

    def _parent(self, namespace: Namespace, file: FileEntry) -> Segment | None:
        if not file.header.parent:
            return namespace.root
        parent = self._index.entries.get(file.header.parent)
        found = isinstance(parent, Segment) and parent.namespace is namespace
        return parent if found and isinstance(parent, Segment) else None

    def _attach(self, namespace: Namespace, parent: Segment, file: FileEntry) -> bool:
        header = file.header
        tokens = token_array(file.tokens)
        if tokens.size == 0 or header.id in self._index.entries:
            self._leave_unattached(file)
            return False
        twin = parent.children.get((header.position, int(tokens[0])))
        if twin is not None and not self._makes_way(twin, tokens, file):
            return False
        try:
            segment = Segment(
                header.id, namespace, header.spec, file.data_bytes,
                tokens.copy(), header.position, header.minimum,
            )  # fmt: skip
            self._index.add_loaded(segment, parent, file, self._age(file))
        except ValueError:
            self._leave_unattached(file)
            return False
        self.loaded += 1
        self._index.namespaces[namespace.name] = namespace
        return True

    def _makes_way(self, twin: Segment, tokens: TokenArray, file: FileEntry) -> bool:
        """Whether ``twin`` left the place that ``file`` claims too; if not, the file is dealt with.

        Of one path the longer stays: a crash came between a successor's rename and the unlink of
        what it absorbed (rule D8). Of two paths the newer: the other was evicted, and could not be
        deleted before the daemon ended.
        """
        if any(entry.holders or entry.file is None for entry in entries_below(twin)):
            # The disk came late. The file is good, and the next start looks at both again.
            self._leave_unattached(file)
            return False
        self.duplicates += 1
        if common_prefix_length(twin.tokens, tokens) == min(twin.tokens.size, tokens.size):
            stays = twin.tokens.size >= tokens.size or not twin.is_leaf
        else:
            stays = self._was_used_after(twin, file)
        if stays:
            self._delete(file)
            return False
        self._index.remove(twin)
        return True

    @staticmethod
    def _was_used_after(twin: Segment, file: FileEntry) -> bool:
        """Whether ``twin`` is the newer; what was used since the start is newer than any file."""
        assert twin.file is not None
        return twin.used > 0 or twin.file.used_seconds >= file.used_seconds

    def _place_checkpoint(self, file: FileEntry) -> None:
        header, namespace = file.header, self._known_namespace(file)
        path = None if namespace is None else tree.walk(namespace.root, token_array(file.tokens))
        position = header.spec.end
        if namespace is None or path is None or path.matched < position or not path.steps:
            self._leave_unattached(file)
            return
        owner = next(s for s, end in path.steps if s.start < position <= end)
        checkpoint = Checkpoint(
            header.id, namespace, header.spec, file.data_bytes, header.attachments
        )
        if self._is_newest(checkpoint, owner.checkpoints.get(checkpoint.key), file):
            self._index.add_loaded(checkpoint, owner, file, self._age(file))
            self.loaded += 1

    def _place_object(self, file: FileEntry) -> None:
        header = file.header
        namespace = self._index.namespaces.get(header.namespace)
        if namespace is None:
            namespace = self._index.new_namespace(header.namespace, b"", Schema())
        entry = ObjectEntry(header.id, namespace, header.spec, file.data_bytes, header.key)
        if self._is_newest(entry, namespace.objects.get(header.key), file):
            self._index.namespaces[namespace.name] = namespace
            self._index.add_loaded(entry, None, file, self._age(file))
            self.loaded += 1

    def _is_newest(self, entry: Entry, twin: Entry | None, file: FileEntry) -> bool:
        """Whether ``entry`` is to be added; what else has its key is an older version, and goes.

        A crash between a replacement's rename and the unlink of what it replaced leaves both.
        """
        if twin is None and entry.id not in self._index.entries:
            return True
        self.duplicates += 1
        if twin is None or twin.file is None or not _is_newer(file, twin.file):
            self._delete(file)
            return False
        self._index.remove(twin)
        return True

    def _known_namespace(self, file: FileEntry) -> Namespace | None:
        """Return the file's namespace if it is there, with the file's schema."""
        namespace = self._index.namespaces.get(file.header.namespace)
        fits = namespace is not None and namespace.schema_digest == file.header.schema_digest
        return namespace if fits else None

    def _namespace(self, file: FileEntry) -> Namespace | None:
        """Return the namespace of a prompt's first file, which brings its schema (N4).

        What hangs on others never does: they may be gone, and the schema another one since. None if
        the schema is lost or another one is in force.
        """
        name, digest = file.header.namespace, file.header.schema_digest
        namespace = self._index.namespaces.get(name)
        if namespace is not None and namespace.schema_digest:
            return namespace if namespace.schema_digest == digest else None
        schema_bytes = self._schemas.get(digest)
        if schema_bytes is None or xxhash.xxh3_128_hexdigest(schema_bytes) != digest:
            return None
        try:
            schema = decode_schema(schema_bytes)
        except SchemaError:
            return None
        if namespace is None:
            namespace = self._index.new_namespace(name, schema_bytes, schema)
        else:  # it held objects alone so far
            namespace.adopt(schema_bytes, schema)
        return namespace

    def _age(self, file: FileEntry) -> float:
        return max(0.0, self._now_wall_seconds - file.used_seconds)

    def _leave_unattached(self, file: FileEntry) -> None:
        self.unattached += 1
        self._index.ssd.add("other", file.allocated_bytes, 1)
        self._index.unattached[file.header.id] = file

    def _delete(self, file: FileEntry) -> None:
        self._index.ssd.add("deleting", file.allocated_bytes)
        self._shared.orders.ssd(DeleteFile(file.header.id, file.path, file.allocated_bytes))


def _is_newer(file: FileEntry, other: FileEntry) -> bool:
    """Whether ``file`` replaced ``other``, or was used after it: only the newer one can have been.

    What a file says of it counts more than times: a clock may have been set back between both.
    """
    if other.header.id in file.header.replaces:
        return True
    if file.header.id in other.header.replaces:
        return False
    return file.used_seconds > other.used_seconds
