from __future__ import annotations

import subprocess
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_console.core.quoting import printable, quote_argv

ARGUMENTS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\x00")), max_size=6)


@settings(max_examples=60, deadline=None)
@given(ARGUMENTS)
def test_a_real_shell_gets_exactly_the_arguments(arguments: list[str]) -> None:
    line = quote_argv(["printf", "%s\\0", "first", *arguments])
    output = subprocess.run(["/bin/sh", "-c", line], capture_output=True, check=True).stdout
    assert output.split(b"\0")[:-1] == [b"first", *(argument.encode() for argument in arguments)]


@pytest.mark.parametrize("argv", [[], ["a\x00b"], ["ls", "\x00"]])
def test_what_no_command_line_can_carry_is_refused(argv: list[str]) -> None:
    with pytest.raises(ValueError, match=r"NUL|at least"):
        quote_argv(argv)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("two\nlines\r\tand", "two\\nlines\\r\\tand"),
        ("line\u2028separator", "line\\u2028separator"),
        (b"\xff".decode("utf-8", "surrogateescape"), "\\udcff"),
        ("plain Größe 漢字 ×", "plain Größe 漢字 ×"),
    ],
)
def test_escapes_controls_and_bidi_marks_become_visible(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_long_text_is_cut_and_says_so() -> None:
    assert printable("x" * 5000, 40) == "x" * 21 + "… (5000 characters)"


@given(st.text(), st.integers(30, 200))
def test_printable_text_is_one_short_harmless_line_and_stays_as_it_is(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert len(shown) <= limit
    assert not any(unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for c in shown)
    assert printable(shown, limit) == shown
