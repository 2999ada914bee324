"""Nouns of product titles without a tagger: every word that is no function word.

Upstream tags titles with spaCy, to judge how near the kinds of two products are. A data folder made with spaCy holds
the tagged nouns; this is what is used otherwise. It comes near, because spaCy takes most capitalised words for names.
It can only change the factor for a product of another kind: the wanted product always has all nouns of its own title.
"""

import re

_WORD = re.compile(r"[^\W\d_][\w’]*")
_WORDS = (
    "a an and any are as at be by can for from has have if in into is it its more most no not of off on one only or "
    "our out over per s so such than that the their them these this those to up use very with without you your"
)
_FUNCTION_WORDS = frozenset(_WORDS.split())


def guess_nouns(title: str) -> list[str]:
    """Words of a title that may be nouns, in order, lower case, repetitions included."""
    return [word for word in _WORD.findall(title.lower()) if word not in _FUNCTION_WORDS]
