"""The text of a store's URI: where the path ends and the faults begin.

Of all stores only a faulty one has a query in its URI, ``faults+s3://bucket/run?seed=1``, so a
path must not be looked for at the end of the text.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote, urlsplit

#: Before the scheme of a store that is to misbehave.
FAULTS_SCHEME: Final = "faults+"


def is_faulty(uri: str) -> bool:
    """Whether ``uri`` asks for injected faults."""
    return uri[: len(FAULTS_SCHEME)].lower() == FAULTS_SCHEME and "://" in uri


def split_query(uri: str) -> tuple[str, str]:
    """``uri`` up to its query, and the query with its "?" ("" where there is none).

    What may follow a "?" in a plain path or in any other URI is part of a name.
    """
    if not is_faulty(uri):
        return uri, ""
    path, mark, query = uri.partition("?")
    return path, mark + query


def plain_uri(uri: str) -> str:
    """The same prefix without the faults."""
    return split_query(uri)[0][len(FAULTS_SCHEME) :] if is_faulty(uri) else uri


def run_name(uri: str) -> str:
    """The last segment of the path: the id of the run whose prefix ``uri`` is."""
    return split_query(uri)[0].rstrip("/").rpartition("/")[2]


def parent_uri(uri: str) -> str:
    """The store that the prefix ``uri`` lies in, with the same faults."""
    path, query = split_query(uri)
    return path.rstrip("/").rpartition("/")[0] + query


def store_text(uri: str) -> str:
    """A store as people write it: a local one as a path."""
    parts = urlsplit(uri)
    return unquote(parts.path) if parts.scheme == "file" else uri
