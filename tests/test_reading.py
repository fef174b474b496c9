"""Reading what others may have written."""

from __future__ import annotations

import math
import os
import tracemalloc
from pathlib import Path

import pytest

from agentlightning.reading import parsed_json, parsed_toml, read_json, read_object, read_text, whole_number


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"ä": [1, -2.5, true, null]}', encoding="utf-8")
    assert read_text(file) == '{"ä": [1, -2.5, true, null]}'
    assert read_json(file) == read_object(file) == {"ä": [1, -2.5, True, None]}


def test_only_regular_files_up_to_a_size_are_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        read_text(file)
    os.mkfifo(file)
    with pytest.raises(OSError, match="no regular file"):
        read_text(file)
    with pytest.raises(OSError, match=r"regular file|directory"):
        read_text(tmp_path)
    file.unlink()
    with file.open("wb") as opened:
        opened.truncate(2**40)
    with pytest.raises(ValueError, match=r"1,099,511,627,776 bytes"):
        read_text(file)
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="decode"):
        read_text(file)
    assert read_text(file, encoding="latin-1") == "ÿ"


def test_a_small_file_takes_little_memory_whatever_may_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("ä" * 2**20)
    tracemalloc.start()
    try:
        assert read_text(tmp_path / "file", 2**29) == "ä" * 2**20
        assert tracemalloc.get_traced_memory()[1] < 2**24, "where memory is limited, more than that may be refused"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 5_000 + "1" + "}" * 5_000, "[1", "", "nope"])
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|line 1|delimiter"):
        parsed_json(text)


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", " 1", "²", "१", "1" * 20, "9" * 5_000])
def test_a_text_that_is_no_whole_number_is_none(text: str) -> None:
    assert whole_number(text) is None
    assert whole_number("0" + "1" * 18) == int("1" * 18)


def test_a_number_beyond_all_floats_is_infinite() -> None:
    assert parsed_json("9" * 5_000) == math.inf
    assert parsed_json("-" + "9" * 400) == -math.inf
    assert parsed_json("123456789012345678901234567890") == 123456789012345678901234567890
    assert float(parsed_json("9" * 300)) < math.inf


def test_another_value_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match="list and no object"):
        read_object(tmp_path / "list.json")


@pytest.mark.parametrize("text", ["a=" + "[" * 100_000, ".".join("a" * 20_000) + "=1", "a=" + "9" * 5_000, "a"])
def test_what_is_no_toml_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|300 parts|digits|Expected"):
        parsed_toml(text)


@pytest.mark.parametrize("text", ["A word. " * 500, "." * 500])
def test_a_text_with_many_dots_is_no_key(text: str) -> None:
    assert parsed_toml(f'about = "{text}"') == {"about": text}
