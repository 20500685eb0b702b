"""Is every answer of a server on a live store that of one commit, and is the commit let go of?"""

from __future__ import annotations

from pathlib import Path

import pytest

import shardb
from tests.support.byte_model import END_ID, VOCAB_SIZE, byte_tokenizer, ids_of
from tests.support.live_serving import (
    Offline,
    ask_while,
    following_server,
    wait_for_commit,
    word_tokenizer,
    writing,
)
from tests.support.scripted_store import followers_of, write_scripted_store
from tests.support.training import TrainProcess, arguments, make_data

RECYCLED_SECONDS = 2.0
TRAINED_SECONDS = 2.0
DIGITS = ("abcdefghij", "ABCDEFGHIJ", "klmnopqrst")


def word_of(step: int) -> str:
    """Spell a step's number without using a letter twice."""
    return "".join(letters[int(d)] for letters, d in zip(DIGITS, f"{step:03d}", strict=True))


def write_step(root: Path, step: int) -> None:
    """Commit a model that says its step's number after a Q."""
    write_scripted_store(
        root,
        followers_of(ids_of("Q" + word_of(step))),
        vocab_size=VOCAB_SIZE,
        eos_token_id=END_ID,
        tokenizer=byte_tokenizer(),
        step=step,
    )


@pytest.fixture(params=["durable", "active"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A place for a store on a disk, and one in memory, whose files are mapped and recycled."""
    if request.param == "durable":
        return tmp_path / "run"
    place: Path = request.getfixturevalue("active")
    return place


def test_is_no_answer_mixed_while_commits_are_recycled(root: Path) -> None:
    write_step(root, 1)
    steps: dict[str, int] = {}

    def write(step: int) -> None:
        write_step(root, step)
        with shardb.open(root) as store:
            steps[store.resolve().id] = step

    with following_server(root, max_resident_bytes=0) as client:
        with shardb.open(root) as store:
            steps[store.resolve().id] = 1
        with writing(write, 2) as written:
            told = ask_while(client, RECYCLED_SECONDS, [ids_of("Q"), ids_of("xQ"), ids_of("yyQ")])
        with shardb.open(root) as store:
            retained, made = len(store.commits()), written["steps"]
    assert [each for each in told if each.text != word_of(steps[each.commit])] == []
    assert len({each.commit for each in told}) > 3
    assert retained < made
    with shardb.open(root) as store:
        assert store.leases.leased_commits() == set()


def test_does_a_live_run_say_what_it_would_offline(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    run = tmp_path / "run"
    flags = arguments(run, data, "--max-steps", "3000", "--snapshot-every", "1")
    with TrainProcess(flags) as trainer:
        trainer.wait_for_step(2)
        wait_for_commit(run, 2)
        with following_server(run, tokenizer=word_tokenizer(64)) as client:
            told = ask_while(client, TRAINED_SECONDS, [[5, 6, 7], [40], [9, 9, 10, 12, 13]])
    assert len({each.commit for each in told}) > 3
    offline = Offline(run)
    assert offline.differing(told) == []
    # The control: an answer under another commit's name is found.
    first, last = told[0], told[-1]
    assert first.commit != last.commit
    mixed = [type(each)(**{**vars(each), "tokens": ("t63", *each.tokens[1:])}) for each in told]
    assert len(offline.differing(mixed)) > 0
