"""Are sizes read alike by every command, and refused with the flag and what to give?"""

from __future__ import annotations

import pytest

from trainer.errors import InputError
from trainer.sizes import SIZE_MAX, in_bytes, size_of


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("8GiB", 8 << 30), ("500MB", 500_000_000), ("1.5 g", 1_500_000_000), ("1024", 1024)),
        *(("5GB", 5 * 10**9), ("2 MiB", 2 << 20), ("1.5kb", 1500), ("7", 7), (" 4096 ", 4096)),
        *(("2TiB", 2 << 40), ("1.5 kib", 1536), ("9007199254740993", 9007199254740993)),
        *(("12B", 12), (str(SIZE_MAX), SIZE_MAX)),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert size_of(text, "--x") == size


@pytest.mark.parametrize(
    "text",
    ["", "much", "-1GiB", "8iB", "2XB", "GB", "1e9", "all", "1,5GB", "5 G B", "٣GB", "9" * 31],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--x is .*: give a size, such as 8GiB"):
        size_of(text, "--x")


@pytest.mark.parametrize("text", ["0", "0.4", "0GiB", "9" * 30 + "TiB", str(SIZE_MAX + 1)])
def test_what_no_machine_counts_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--x is .*: give a size from 1 bytes to 9,223,372.04 TB"):
        size_of(text, "--x")


def test_nothing_is_a_size_where_it_means_something() -> None:
    assert size_of("0", "--x", least=0) == 0
    with pytest.raises(InputError, match="from 1,024 bytes"):
        size_of("1000", "--x", least=1024)


def test_a_text_without_end_is_not_repeated_whole() -> None:
    with pytest.raises(InputError) as caught:
        size_of("8" * 10_000, "--x")
    assert len(str(caught.value)) < 200


def test_sizes_are_told_in_powers_of_ten() -> None:
    told = [in_bytes(n) for n in (0, 999, 1000, 1500, 10**9, 12 * 10**12, 1.5e18)]
    assert told == [
        *("0 bytes", "999 bytes", "1.00 kB", "1.50 kB", "1.00 GB", "12.00 TB", "1,500,000.00 TB")
    ]
