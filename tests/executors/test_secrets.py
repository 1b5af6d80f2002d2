"""A secret is told by nothing but ``reveal``, and what comes back from a provider is masked."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import pickle
import pprint
import shlex
import threading
import traceback
import urllib.parse
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import LaunchOptions
from diloco_cloud.launch_request import check_launch
from diloco_cloud.secrets import (
    MASK,
    Secret,
    masked,
    parse_secret,
    read_secrets,
    redacted,
    revealed,
    unlogged,
)

CANARY = "canary-3e1b-in-the-mine"
SECRET = Secret("HF_TOKEN", CANARY)


@dataclasses.dataclass
class Holder:
    """A request of some executor."""

    secrets: dict[str, Secret]


SHOWN: dict[str, Callable[[Secret], object]] = {
    "repr": repr,
    "str": str,
    "format": lambda one: format(one, ">40"),
    "f-string": lambda one: f"{one} {one!r} {one!s:.99}",
    "percent": lambda one: "%s %r" % (one, one),  # noqa: UP031
    "in a list": lambda one: str([one]),
    "pprint": lambda one: pprint.pformat({"a": [one]}),
    "json by str": lambda one: json.dumps({"a": one}, default=str),
    "dataclass": lambda one: repr(Holder({"A": one})),
    "asdict": lambda one: dataclasses.asdict(Holder({"A": one})),
    "copy": copy.copy,
    "deep copy": lambda one: copy.deepcopy([one]),
    "attributes": lambda one: {name: getattr(one, name) for name in dir(one)},
    "slots": lambda one: {name: getattr(one, name) for name in Secret.__slots__},
    "traceback": lambda one: _traceback_through(one),
}


def _traceback_through(secret: Secret) -> str:
    def fail(given: Secret) -> None:
        raise ValueError(f"no such {given}")

    try:
        fail(secret)
    except ValueError as error:
        return "".join(
            traceback.TracebackException.from_exception(error, capture_locals=True).format()
        )
    raise AssertionError


@pytest.mark.parametrize("way", SHOWN)
def test_secret_shows_its_name_and_never_its_value(way: str) -> None:
    shown = repr(SHOWN[way](SECRET))
    assert "HF_TOKEN" in shown
    assert CANARY not in shown


STORED: dict[str, Callable[[Secret], object]] = {
    "json": json.dumps,
    "json by vars": lambda one: json.dumps(one, default=vars),
    "vars": vars,
    "state": lambda one: one.__getstate__(),
    "a request": lambda one: pickle.dumps(Holder({"A": one})),
    **{
        f"pickle {number}": lambda one, number=number: pickle.dumps(one, number)  # type: ignore[misc]
        for number in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


@pytest.mark.parametrize("way", STORED)
def test_secret_cannot_be_stored(way: str) -> None:
    with pytest.raises(TypeError) as caught:
        STORED[way](SECRET)
    assert CANARY not in repr(caught.value)
    if "pickle" in way:
        assert "HF_TOKEN stays in its process" in str(caught.value)


def test_secret_tells_its_value_when_it_is_asked() -> None:
    assert (SECRET.name, SECRET.reveal()) == ("HF_TOKEN", CANARY)
    assert revealed({"A": SECRET}) == {"A": CANARY}
    assert copy.deepcopy(SECRET).reveal() == CANARY
    with pytest.raises(TypeError, match="str and int"):
        Secret("A", 5)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        SECRET.name = "B"  # type: ignore[misc]


@given(st.text(), st.text())
def test_secrets_are_equal_by_name_and_value(one: str, other: str) -> None:
    assert Secret("A", one) == Secret("A", one)
    assert (Secret("A", one) == Secret("A", other)) == (one == other)
    assert Secret("A", one) != Secret("B", one)
    assert Secret("A", one) != one
    assert hash(Secret("A", one)) == hash(Secret("A", other))  # a hash would tell of the value


# -- what comes back -------------------------------------------------------------------------------

#: As providers and their SDKs quote what they were sent.
QUOTED: dict[str, Callable[[str], str]] = {
    "plain": str,
    "JSON": json.dumps,
    "UTF-8 JSON": lambda text: json.dumps(text, ensure_ascii=False),
    "JSON in JSON": lambda text: json.dumps(json.dumps({"A": text})),
    "Python": repr,
    "bytes": lambda text: repr(text.encode()),
    "a URL": lambda text: urllib.parse.urlencode({"a": text}),
    "a path": lambda text: urllib.parse.quote(text, safe=""),
    "a shell": shlex.quote,
}


@given(
    # Not of the characters that the frames below, or the mask, are made of.
    st.text(st.characters(codec="utf-8", exclude_characters="*"), min_size=4),
    st.sampled_from(sorted(QUOTED)),
)
def test_redacted_leaves_nothing_of_a_value(value: str, how: str) -> None:
    quoted = QUOTED[how](value)
    text = f"the value {quoted} is refused"
    told = redacted(text, [Secret("A", value)])
    assert value not in told
    assert MASK in told


def test_redacted_takes_out_the_longest_value_first() -> None:
    secrets = [Secret("A", "abc"), Secret("B", "abcdef"), Secret("C", "")]
    assert redacted("abcdef, abc: no", secrets) == "***, ***: no"
    assert redacted("nothing", []) == "nothing"
    assert masked("a+b%2Fc", ["a b/c", "a+b/c"]) == MASK


@pytest.mark.parametrize("value", ["e", "401", "a b"])
def test_redacted_leaves_words_that_hold_a_short_value(value: str) -> None:
    secrets = [Secret("A", value), Secret("B", "long-value")]
    text = "the request is refused: 4010 creatures, area boundary"
    assert redacted(text, secrets) == text
    assert redacted(f"{text} ({value}, '{value}')", secrets) == f"{text} ({MASK}, '{MASK}')"


# -- where they come from --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "pair"),
    [("A", ("A", "A")), ("A=B", ("A", "B")), ("_a1=b_2", ("_a1", "b_2")), ("A=A", ("A", "A"))],
)
def test_entry_is_a_name_or_two(entry: str, pair: tuple[str, str]) -> None:
    assert parse_secret(entry) == pair


@pytest.mark.parametrize("entry", ["", "=", "=B", "A=", "A-B", "A B", "1A", "A=b-c", "A=B=C", "Ä"])
def test_entry_that_is_no_name_is_refused_and_not_repeated(entry: str) -> None:
    with pytest.raises(ConfigError, match="no name of a variable") as caught:
        parse_secret(entry)
    assert "NAME=SOURCE" in (caught.value.fix or "")
    assert entry.partition("=")[2] in ("", "B") or entry.partition("=")[2] not in str(caught.value)


@given(st.text())
def test_entry_that_is_a_value_is_never_repeated(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_secret(f"HF_TOKEN={value}9-{CANARY}")
    assert CANARY not in str(caught.value)


def test_secrets_are_read_by_the_replicas_names() -> None:
    environ = {"A": "1", "HF_AWS_KEY": "2", "EMPTY": ""}
    found = read_secrets(["A", "AWS_KEY=HF_AWS_KEY", "EMPTY", "A"], environ)
    assert revealed(found) == {"A": "1", "AWS_KEY": "2", "EMPTY": ""}
    assert [secret.name for secret in found.values()] == ["A", "AWS_KEY", "EMPTY"]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["NO_SUCH"], "the secret NO_SUCH is not set"),
        (["A=NO_SUCH"], "the variable given after A= is not set in this environment"),
        (["A=A", "A=B"], "the secret A is given twice"),
        (["A=BYTES"], "the secret BYTES is not UTF-8 text"),
    ],
)
def test_secret_that_is_not_there_is_refused_with_a_fix(entries: list[str], words: str) -> None:
    environ = {"A": CANARY, "B": f"{CANARY}2", "BYTES": f"{CANARY}\udcff"}
    with pytest.raises(ConfigError) as caught:
        read_secrets(entries, environ)
    assert words in caught.value.message
    assert caught.value.fix
    assert CANARY not in repr(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("value", ["hf_looksLikeAName", "AKIALOOKSLIKEANAME"])
def test_value_in_place_of_a_name_is_not_repeated(value: str) -> None:
    with pytest.raises(ConfigError, match="not set in this environment") as caught:
        read_secrets([f"HF_TOKEN={value}"], {})
    assert value not in str(caught.value)
    assert "never a value" in (caught.value.fix or "")


def test_request_holds_secrets_and_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", CANARY)
    options = LaunchOptions(secrets=["HF_TOKEN=MINE"], env={"A": "B"})
    request = check_launch(2, "json:dumps", {"obj": 1}, options, timeout=60)
    assert request.secrets == {"HF_TOKEN": SECRET}
    assert request == check_launch(2, "json:dumps", {"obj": 1}, options, timeout=60)
    texts = [repr(request), repr(dataclasses.asdict(request)), repr(request.environment(0))]
    assert not [text for text in texts if CANARY in text]
    assert "HF_TOKEN" in texts[0]
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(request)


# -- loud SDKs -------------------------------------------------------------------------------------


@pytest.fixture
def loud(caplog: pytest.LogCaptureFixture) -> Any:
    """An SDK's loggers, one of which somebody wants to hear more of than of the rest."""
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="some_sdk.endpoint")
    return caplog


def test_unlogged_silences_an_sdk_and_those_below_it(loud: pytest.LogCaptureFixture) -> None:
    names = ("some_sdk", "some_sdk.endpoint", "some_sdk.other", "some_sdk_of_others")
    levels = [logging.getLogger(name).level for name in names]
    with unlogged("some_sdk"):
        for name in names:
            logging.getLogger(name).debug("body of %s", name)
            logging.getLogger(name).warning("warning of %s", name)
    assert [record.message for record in loud.records if "body" in record.message] == [
        "body of some_sdk_of_others"
    ]
    assert sum("warning" in record.message for record in loud.records) == 4
    assert [logging.getLogger(name).level for name in names] == levels


def test_unlogged_by_two_threads_silences_both(loud: pytest.LogCaptureFixture) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with unlogged("some_sdk"):
            inside.set()
            go_on.wait(10)

    def follow() -> None:
        with unlogged("some_sdk"):
            logging.getLogger("some_sdk").debug("body of the second")

    first, second = threading.Thread(target=hold), threading.Thread(target=follow)
    first.start()
    assert inside.wait(10)
    second.start()
    go_on.set()
    for thread in (first, second):
        thread.join(10)
    logging.getLogger("some_sdk").debug("afterwards")
    assert [record.message for record in loud.records] == ["afterwards"]
