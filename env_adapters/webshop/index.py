"""Full-text search, ranked exactly as Lucene ranks it (BM25 with Anserini's constants).

Lucene keeps the length of a document in one byte, and computes in single precision. Both decide ties and near ties,
so both are done here.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice

import numpy as np

from env_adapters.webshop.analysis import terms

K1 = 0.9
B = 0.4
# Lucene refuses longer queries; here the terms beyond are ignored.
MAX_QUERY_TERMS = 1024
_EXACT_LENGTHS = 24


def stored_length(length: int) -> int:
    """The length that Lucene reads back from its one byte: exact below 24, four significant bits of the rest."""
    if length < _EXACT_LENGTHS:
        return length
    rest = length - _EXACT_LENGTHS
    shift = max(0, rest.bit_length() - 4)
    return _EXACT_LENGTHS + (rest >> shift << shift)


def _idf(documents: int, holding: int) -> np.float32:
    return np.float32(math.log(1 + (documents - holding + 0.5) / (holding + 0.5)))


class SearchIndex:
    """An inverted index; immutable once built, so that any number of threads may search it.

    Args:
        documents: document id → text. Documents with equal scores are ranked by id.
    """

    def __init__(self, documents: dict[str, str]) -> None:
        self._ids = sorted(documents)
        counts = [Counter(terms(documents[key])) for key in self._ids]
        lengths = [count.total() for count in counts]
        filled = sum(length > 0 for length in lengths)
        # Postings, sorted by term, then by document.
        vocabulary: dict[str, int] = {}
        numbers = [vocabulary.setdefault(term, len(vocabulary)) for count in counts for term in count]
        order = np.argsort(np.array(numbers, dtype=np.int32), kind="stable")
        where = np.repeat(np.arange(len(counts), dtype=np.int32), [len(count) for count in counts])[order]
        times = np.array([n for count in counts for n in count.values()], dtype=np.float32)[order]
        # From here on in single precision throughout.
        one, k1, b = np.float32(1), np.float32(K1), np.float32(B)
        average = np.float32(sum(lengths) / max(1, filled))
        stored = np.array([stored_length(length) for length in lengths], dtype=np.float32)
        scale = one / (k1 * ((one - b) + b * stored / average)) if filled else stored
        divisors = one + times * scale[where]
        ends = np.cumsum(np.bincount(numbers, minlength=len(vocabulary))).tolist() if numbers else []
        starts = [0, *ends]
        # term → its weight, the documents that hold it, and 1 + tf / (k1 · (1 - b + b · length / average)) in each.
        self._postings = {
            term: (_idf(filled, ends[n] - starts[n]), where[starts[n] : ends[n]], divisors[starts[n] : ends[n]])
            for term, n in vocabulary.items()
        }

    def search(self, query: str, limit: int) -> list[tuple[str, float]]:
        """The best documents with their scores, best first.

        Args:
            query: any text; its first 1,024 terms count.
            limit: most documents returned. A document that shares no term with the query never is.
        """
        scores = np.zeros(len(self._ids))
        for term, times in Counter(islice(terms(query), MAX_QUERY_TERMS)).items():
            if term not in self._postings:
                continue
            idf, where, divisor = self._postings[term]
            weight = np.float32(times) * idf
            scores[where] += weight - weight / divisor
        rounded = scores.astype(np.float32)
        # Documents are in the order of their ids, and the sort is stable.
        best: Sequence[int] = np.argsort(-rounded, kind="stable")[:limit].tolist()
        return [(self._ids[position], float(rounded[position])) for position in best if rounded[position] > 0]
