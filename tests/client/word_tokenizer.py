"""A real tokenizer of a few words, for tests that generate with tiny models."""

import functools
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast


@functools.cache
def word_tokenizer(vocab_size: int) -> Any:
    """Return a tokenizer in which the word "17" is token 17, and token 1 is the stop token."""
    # Marks of their own: a special token "1" would be cut out of "17".
    vocabulary = {"<unknown>": 0, "<end>": 1} | {str(i): i for i in range(2, vocab_size)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unknown>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unknown>")
