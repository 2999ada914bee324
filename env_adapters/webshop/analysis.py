"""English text analysis as in Lucene's English analyzer: the tokens that WebShop's search compares.

Standard tokenizer (word boundaries of Unicode annex 29, pictographs as tokens of their own), possessive `'s` removed,
lower case, stop words removed, Porter's stemmer in its author's own version.
"""

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
MAX_TOKEN = 255  # longer words are cut into pieces

# Classes of the property Word_Break. Whatever may follow a character without ending the word (accents, joiners) is
# taken along possessively: there is nothing to come back to, and any text takes linear time.
_TAIL = r"[\p{WB=Format}\p{WB=Extend}\p{WB=ZWJ}]*+"
_LETTER = r"[\p{WB=ALetter}\p{WB=Hebrew_Letter}]"
_IN_WORDS = r"[\p{WB=MidLetter}\p{WB=MidNumLet}\p{WB=Single_Quote}]"  # the apostrophe of don't
_IN_NUMBERS = r"[\p{WB=MidNum}\p{WB=MidNumLet}\p{WB=Single_Quote}]"  # the point of 3.5
_CONNECTOR = rf"\p{{WB=ExtendNumLet}}{_TAIL}"  # the underscore
_WORD = (
    rf"(?:{_LETTER}++{_TAIL}(?:{_IN_WORDS}{_TAIL}(?={_LETTER}))?"
    rf"|\p{{WB=Numeric}}++{_TAIL}(?:{_IN_NUMBERS}{_TAIL}(?=\p{{WB=Numeric}}))?"
    rf"|\p{{WB=Katakana}}++{_TAIL}|{_CONNECTOR})++"
)
# Lucene's table of pictographs is older than that of `regex`, and wider in the first block of symbols.
_PICTOGRAPH = (
    r"[\p{Extended_Pictographic}\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2763-\u2767]"
)
_EMOJI = rf"{_PICTOGRAPH}{_TAIL}(?:(?<=\u200d){_PICTOGRAPH}{_TAIL})*+"
_TOKEN = rf"{_WORD}|{_EMOJI}|[\p{{Han}}\p{{Hiragana}}]{_TAIL}"
_APOSTROPHES = ("'", "\u2019", "\uff07")


def terms(text: str) -> Iterator[str]:
    """Index terms of a text, in order, repetitions included."""
    for match in _token_pattern().finditer(text):
        token = match.group()
        if not token[0].isalnum() and _connector_pattern().fullmatch(token):
            continue  # a rule of underscores is no word
        for start in range(0, len(token), MAX_TOKEN):
            term = _term(token[start : start + MAX_TOKEN])
            if term is not None:
                yield term


@functools.lru_cache(maxsize=1 << 15)
def _term(token: str) -> str | None:
    if len(token) >= 2 and token[-1] in "sS" and token[-2] in _APOSTROPHES:
        token = token[:-2]
    token = token.lower()
    if not token or token in STOP_WORDS:
        return None
    return _stemmer()(token)


# Imported at first use: tasks can be listed, and a missing package reported, without either.


@functools.cache
def _token_pattern() -> Any:
    import regex

    return regex.compile(_TOKEN, regex.V1)


@functools.cache
def _connector_pattern() -> Any:
    import regex

    return regex.compile(rf"(?:{_CONNECTOR})+", regex.V1)


@functools.cache
def _stemmer() -> Callable[[str], str]:
    # Importing NLTK imports what it can find, and some of that draws from the global generator (rich does).
    state = random.getstate()
    try:
        from nltk.stem.porter import PorterStemmer
    finally:
        random.setstate(state)
    return functools.partial(PorterStemmer(mode=PorterStemmer.MARTIN_EXTENSIONS).stem, to_lowercase=False)
