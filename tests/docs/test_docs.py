"""The documentation says only what is so: links lead somewhere, commands exist, code compiles."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from diloco_cloud.cli.main import cli
from diloco_cloud.run import by_backend, config

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
README_LINES = 150


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        yield Block(page, text[: match.start()].count("\n") + 1, match[1], match[2])


BLOCKS = [block for page in PAGES for block in _blocks(page)]


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def _anchors(page: Path) -> set[str]:
    """Heading anchors as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def _commands(block: Block) -> Iterator[list[str]]:
    """The words of each `diloco-cloud …` command of a shell block, up to a pipe or a `;`."""
    joined = re.sub(r"\\\n\s*", " ", block.text)
    for line in joined.splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        if words[:1] == ["diloco-cloud"]:
            ends = [i for i, word in enumerate(words) if set(word) <= set("|;&()<>")]
            yield words[1 : min(ends, default=len(words))]


COMMANDS = [
    pytest.param(words, id=f"{block}: {shlex.join(words)}")
    for block in BLOCKS
    if block.language in ("bash", "console", "sh")
    for words in _commands(block)
]


def _placeholder(word: str) -> bool:
    return word in ("…", "...")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        destination = (page.parent / path).resolve() if path else page
        there = destination.is_relative_to(ROOT) and destination.exists()
        if not there or (anchor and anchor not in _anchors(destination)):
            broken.append(target)
    assert broken == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < README_LINES


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_blocks_compile(block: Block) -> None:
    compile(block.text, str(block), "exec", flags=ast.PyCF_ONLY_AST)


def _taken(table: dict[str, object]) -> dict[str, object]:
    """What a backend's table has that is no setting of its executor."""
    return {key: table.pop(key) for key in by_backend.KEYS if key in table}


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml"], ids=str)
def test_configurations_are_accepted(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(block.text)
    settings = config.resolve({}, environ={}, file=file)
    written = tomllib.loads(block.text)
    spec = settings.spec.to_json()
    if isinstance(written.get("backend"), dict):  # a table of settings for each backend
        tables = written.pop("backend")
        own = {backend: _taken(table) for backend, table in tables.items()}
        assert spec["backend_args"] == tables
        sides = {side["backend"]: side for side in spec.get("fleet", ())}
        for backend, values in own.items():
            assert {key: sides[backend][key] for key in values} == values
    named = written.keys() - {"name", "store", "timeout", "secrets"}
    assert {key: spec[key] for key in named} == {key: written[key] for key in named}


def test_commands_are_found() -> None:
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_use_what_the_cli_has(words: list[str]) -> None:
    command: click.Command = cli
    context = click.Context(command)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, found, words = command.resolve_command(context, words)
        assert found is not None, f"no command {name}"
        command, context = found, click.Context(found, info_name=name, parent=context)
    arguments = [word for word in words if not _placeholder(word)]
    # The parser knows the options; values and required arguments are for the command itself.
    command.make_parser(context).parse_args(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    shell = "\n".join(b.text for b in BLOCKS if b.page == page and b.language == "bash")
    inline = " ".join(re.findall(r"`(make [a-z-]+)", _prose(page)))
    used = set(re.findall(r"\bmake ([a-z-]+)", f"{shell}\n{inline}"))
    assert used <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_no_machine_of_ours(page: Path) -> None:
    assert re.findall(r"(?<![\w.~])/(?:home|root|work|Users|tmp)/\S*", page.read_text()) == []
