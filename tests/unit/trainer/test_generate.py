"""Is the next token chosen as asked, and does streamed text equal the text decoded at once?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from trainer.errors import InputError
from trainer.generate import Sampling, generate_ids, stream_text

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0])


def draw(sampling: Sampling, count: int = 400) -> Counter[int]:
    generator = torch.Generator().manual_seed(5)
    return Counter(sampling.choose(LOGITS, generator) for _ in range(count))


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_without_temperature_the_most_likely_token_is_taken(temperature: float) -> None:
    assert set(draw(Sampling(temperature=temperature))) == {1}


def test_with_temperature_tokens_come_as_often_as_they_are_likely() -> None:
    counts = draw(Sampling(temperature=1.0), 4000)
    shares = torch.softmax(LOGITS, dim=0)
    for token, share in enumerate(shares):
        assert counts[token] / 4000 == pytest.approx(float(share), abs=0.03)


def test_top_k_and_top_p_keep_the_most_likely_ones() -> None:
    assert set(draw(Sampling(temperature=5.0, top_k=2))) == {1, 3}
    assert set(draw(Sampling(temperature=1.0, top_p=0.7))) == {1, 3}
    assert set(draw(Sampling(temperature=1.0, top_p=1e-9))) == {1}
    assert set(draw(Sampling(temperature=1.0, top_k=99))) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}],
)
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Sampling(**wrong)  # type: ignore[arg-type]


def next_is_one_more(ids: Sequence[int]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor((ids[-1] + 1) % 8), 8).float()


def test_generation_stops_at_the_end_token_or_the_limit() -> None:
    def ids(limit: int) -> list[int]:
        greedy = Sampling(temperature=0)
        return list(
            generate_ids(
                next_is_one_more, [2], sampling=greedy, max_new_tokens=limit, seed=0, end_id=6
            )
        )

    assert ids(99) == [3, 4, 5]
    assert ids(2) == [3, 4]


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["plain", "Zürich", "日本語 text", "🙂🙂", "", "a\u0301é"])
def test_streamed_text_is_whole_characters_and_equals_the_text(text: str) -> None:
    pieces = list(stream_text(iter(text.encode()), decode_bytes))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_not_held_for_ever() -> None:
    data = b"ab\xff\xff\xff\xff\xff\xffcd"
    pieces = list(stream_text(iter(data), decode_bytes))
    assert "".join(pieces) == data.decode("utf-8", errors="replace")


def test_an_unfinished_character_at_the_end_is_said() -> None:
    data = "aü".encode()[:-1]
    assert "".join(stream_text(iter(data), decode_bytes)) == "a\ufffd"


def test_text_goes_on_from_its_prompt_with_the_space_between() -> None:
    """A SentencePiece decoder drops the space before the first word it is given."""
    words = ["Zoo", "was", "a"]

    def decode(ids: Sequence[int]) -> str:
        return " ".join(words[i] for i in ids)

    assert list(stream_text(iter([1, 2]), decode, prompt=[0])) == [" was", " a"]
    assert list(stream_text(iter([1, 2]), decode)) == ["was", " a"]
