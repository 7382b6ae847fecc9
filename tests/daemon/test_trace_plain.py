"""What of a message goes into a trace, and what does not."""

from typing import Any

import pytest

from prefixcached.daemon.trace.plain import PlainForm
from prefixcached.protocol import actor_messages as inner
from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.tokens import pack_tokens, token_array

TOKENS = pack_tokens([5, 6, 7, 8])
SPEC = ImageSpec(ImageKind.OBJECT, metadata=b"SECRET-metadata")
HEADER = inner.FileHeader(
    1, "0" * 32, ImageKind.OBJECT, "n", SPEC, key="SECRET-key", tokens_checksum="SECRET-checksum"
)
ENTRY = inner.FileEntry(HEADER, "n/x", TOKENS, 0, 1, 1)

TELLING: list[Any] = [
    inner.Call(1, wire.Take("n", TOKENS, label="SECRET-label")),
    inner.Call(1, wire.Offer("n", TOKENS, b"", checkpoint=SPEC, label="SECRET-label")),
    inner.Call(1, wire.Prefetch("n", TOKENS, label="SECRET-label")),
    inner.Call(1, wire.Peek("n", TOKENS)),
    inner.Call(1, wire.Contains("n", TOKENS)),
    inner.Call(1, wire.Explain("n", TOKENS)),
    inner.Call(1, wire.CloseLabel("SECRET-label")),
    inner.Call(1, wire.OfferObject("n", "SECRET-key", SPEC)),
    inner.Call(1, wire.TakeObject("n", "SECRET-key")),
    inner.WriteImage(HEADER, TOKENS, b""),
    inner.Loaded((ENTRY,)),
    inner.Written("0" * 32, ENTRY),
    inner.ReadImage(1, ENTRY),
    inner.TouchFile(ENTRY),
    wire.Hit(lease=1, length=0, tier="ram", parts=(wire.Part(SPEC, 0, 0),)),
    wire.Grant(put=1, base=0, images=(SPEC,)),
    wire.ActivityReport(clients=(), labels=(wire.LabelActivity("SECRET-label", "n", 3, 0.0),)),
    wire.Listing(
        namespaces=(
            wire.ListedNamespace(
                "n", 1,
                (wire.Listed("object", 0, 0, 0, 1, True, False, None, 1, 1, 0, "SECRET-key"),),
            ),
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize("message", TELLING, ids=lambda message: type(message).__name__)
def test_tokens_and_names_never_stay(message: Any) -> None:
    """Whatever message they travel in: tokens, labels, keys and metadata are not in the trace."""
    told = str(PlainForm(keep_tokens=False).of(message))
    assert "SECRET" not in told
    assert str(TOKENS)[2:-1] not in told


@pytest.mark.parametrize("message", TELLING, ids=lambda message: type(message).__name__)
def test_asked_for_they_stay(message: Any) -> None:
    """`--trace-tokens` keeps tokens and names, and of metadata still the size alone."""
    told = str(PlainForm(keep_tokens=True).of(message))
    assert "SECRET-metadata" not in told
    for asked_for in ("SECRET-label", "SECRET-key", repr(TOKENS)):
        assert (asked_for in told) == (asked_for in repr(message))


def test_equal_names_have_equal_digests() -> None:
    """A conversation can be followed without its name, within one trace."""
    form = PlainForm(keep_tokens=False)
    one = form.of(wire.Take("n", TOKENS, label="a"))["label"]
    assert form.of(wire.CloseLabel("a"))["label"] == one
    assert form.of(wire.CloseLabel("b"))["label"] != one
    assert PlainForm(keep_tokens=False).of(wire.CloseLabel("a"))["label"] != one


def test_sizes_stay() -> None:
    """Metadata is its number of bytes, tokens of a file their number."""
    form = PlainForm(keep_tokens=False)
    entry = form.of(inner.Written("0" * 32, ENTRY))["entry"]
    assert entry["tokens"] == 4
    assert entry["header"]["spec"]["metadata"] == len(SPEC.metadata)


def test_continuations_fit_the_prompt() -> None:
    """T9: what an explanation shows behind the prompt's first tokens has digests of its place."""
    form = PlainForm(keep_tokens=False)
    explain = wire.Explain("n", pack_tokens([5, 6, 99]))
    reply = wire.Explanation(
        length=0, ram_length=0, matched=2, continuations=(pack_tokens([7, 8]),)
    )
    shown = form.of(reply, explain)["continuations"][0]
    whole = form.of(wire.Peek("n", TOKENS))["tokens"]
    assert token_array(shown).tolist() == token_array(whole).tolist()[2:]
