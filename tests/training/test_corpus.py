"""Tokenizers, and the way from text to .bin and .idx and back."""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from pathlib import Path

import corpus
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool import forked, run_program
from releases import EXTRA_TOKENS

from megatron.pipeline.session.tokenizer import ByteLevelTokenizer, build_tokenizer, padded_vocab_size
from megatron.pipeline.trainer import data_files

BYTES = Namespace(tokenizer_type="ByteLevelTokenizer")
SCRIPT = Path(__file__).parents[2] / "scripts" / "preprocess_data.py"


@given(st.binary())
def test_bytes_are_lossless(data: bytes) -> None:
    tokenizer = ByteLevelTokenizer()
    text = data.decode("utf-8", "surrogateescape")
    ids = tokenizer.tokenize(text)
    assert ids == list(data)
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == text
    assert tokenizer.eod not in ids


def test_null_tokenizer() -> None:
    tokenizer = build_tokenizer(Namespace(tokenizer_type="NullTokenizer", vocab_size=10))
    size = 10 + EXTRA_TOKENS
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.tokenize("1 2")) == (size, size - 1, [1, 2])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (Namespace(tokenizer_type="NullTokenizer", vocab_size=None), "needs --vocab-size"),
        (Namespace(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=None), "needs --tokenizer-model"),
        (Namespace(tokenizer_type="SentencePieceTokenizer", tokenizer_model="/nowhere"), "no such file"),
        (Namespace(tokenizer_type="Other"), "unknown --tokenizer-type Other: choose from ByteLevelTokenizer"),
    ],
)
def test_tokenizer_errors(args: Namespace, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(args)


def test_padding() -> None:
    args = Namespace(make_vocab_size_divisible_by=128, tensor_model_parallel_size=2)
    assert padded_vocab_size(257, args) == 512
    assert padded_vocab_size(256, args) == 256


def write(tmp_path: Path, files: dict[str, str], keys: tuple[str, ...] = ("text",), workers: int = 1) -> str:
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    for name, text in files.items():
        (source / name).write_text(text)
    documents = corpus.read_documents(corpus.find_files([str(source)]), keys, "surrogateescape")
    prefix = str(tmp_path / "out" / f"data{workers}")
    corpus.write_dataset(documents, prefix, keys, BYTES, append_eod=True, workers=workers, progress=lambda _: None)
    return prefix


def texts(prefix: str) -> list[str]:
    index = data_files.read_index(prefix)
    tokens = numpy.fromfile(prefix + ".bin", dtype=index.dtype)
    pieces = numpy.split(tokens, numpy.cumsum(index.lengths)[:-1])
    return [ByteLevelTokenizer().detokenize(map(int, piece)) for piece in pieces]


def test_text_round_trip(tmp_path: Path) -> None:
    files = {"b.txt": "second\r\n  ", "a.txt": "first é\n", "c.txt": "line\n" * 10_000, "d.bin": "\0", "empty.txt": ""}
    prefix = write(tmp_path, files) + "_text_document"
    found = texts(prefix)
    assert found[:2] == ["first é\n", "second\r\n  "]
    assert len(found) > 4, "a long file is cut into documents"
    assert "".join(found[2:]) == files["c.txt"]


def test_json_lines_and_workers(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps({"text": f"text {n}", "code": f"code {n}"}) for n in range(100))
    one = write(tmp_path, {"a.jsonl": lines}, ("text", "code"))
    assert texts(one + "_code_document") == [f"code {n}" for n in range(100)]
    two = write(tmp_path, {}, ("text", "code"), workers=2)
    for key in ("text", "code"):
        for suffix in (".bin", ".idx"):
            path = f"_{key}_document{suffix}"
            assert Path(one + path).read_bytes() == Path(two + path).read_bytes()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.jsonl": "{"}, "a.jsonl, line 1: not a JSON object"),
        ({"a.jsonl": '{"text": "x"}\n{"content": "x"}'}, "a.jsonl, line 2: no key 'text'"),
        ({}, "directory without text files"),
        ({"a.txt": ""}, "no text found in the input, which is empty or blank: nothing was written to"),
    ],
)
def test_bad_input(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path, files)


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file where the directory of the output should be")
    with pytest.raises(ValueError, match=r"cannot write .*out/data1: File exists: "):
        write(tmp_path, {"a.txt": "some text"})


def test_standard_library_is_real_and_bounded() -> None:
    files = corpus.standard_library(1_000_000)
    assert files == corpus.standard_library(1_000_000)
    assert 800_000 < sum(path.stat().st_size for path in files) <= 1_000_000
    assert not any("test" in path.parts for path in files)


def read_for_ever(pipe: Path, out: Path) -> None:
    """Makes a file for every document that is done."""
    documents = corpus.read_documents([pipe], ["text"], "strict")
    corpus.write_dataset(documents, str(out), ["text"], BYTES, True, 1, lambda _: out.touch())


def test_killed_run_leaves_no_index(tmp_path: Path) -> None:
    """The reader waits on a pipe that never ends, so the kill always strikes in the middle."""
    pipe, out = tmp_path / "endless.txt", tmp_path / "out"
    os.mkfifo(pipe)
    process = forked(read_for_ever, pipe, out)
    with open(os.open(pipe, os.O_RDWR), "w") as writer:  # reading, too: it does not wait for a program that has died
        writer.write("a line\n" * 10_000)
        writer.flush()
        while not out.exists():
            assert process.is_alive(), "it ends before a document is done"
            time.sleep(0.01)
        process.kill()
        process.join()
    assert not (tmp_path / "out_text_document.idx").exists()
    with pytest.raises(ValueError, match="does not exist"):
        data_files.read_index(str(tmp_path / "out_text_document"))


def test_script(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello\n")
    prefix = str(tmp_path / "data")
    code, output = run_program(SCRIPT, "--input", str(tmp_path / "a.txt"), "--output-prefix", prefix, "--append-eod")
    assert code == 0 and "data_text_document: 1 documents, 7 tokens" in output, output
    assert texts(prefix + "_text_document") == ["hello\n"]


class TestDataFiles:
    @pytest.fixture
    def prefix(self, tmp_path: Path) -> str:
        return write(tmp_path, {f"{n}.txt": "text\n" * (n + 1) for n in range(10)}) + "_text_document"

    def test_missing(self, prefix: str) -> None:
        Path(prefix + ".bin").unlink()
        with pytest.raises(ValueError, match=r"\.bin does not exist"):
            data_files.read_index(prefix)

    @pytest.mark.parametrize("suffix", [".bin", ".idx"])
    def test_truncated(self, prefix: str, suffix: str) -> None:
        path = Path(prefix + suffix)
        path.write_bytes(path.read_bytes()[:-2])
        with pytest.raises(ValueError, match="truncated"):
            data_files.read_index(prefix)

    def test_not_an_index(self, prefix: str) -> None:
        Path(prefix + ".idx").write_text("something else that is long enough for a header")
        with pytest.raises(ValueError, match="not an index of Megatron's format"):
            data_files.read_index(prefix)

    def test_other_tokenizer(self, prefix: str) -> None:
        data_files.check_prefix(prefix, 257)
        with pytest.raises(ValueError, match="holds the token 256, but the tokenizer has 100 tokens"):
            data_files.check_prefix(prefix, 100)

    def test_splits(self, prefix: str) -> None:
        assert [data_files.split_has_tokens(prefix, "90,10,0", number) for number in range(3)] == [True, True, False]
        assert [data_files.split_has_tokens(prefix, "98,1,1", number) for number in range(3)] == [True, False, False]
        assert data_files.split_has_tokens(prefix, None, 1)

    def test_blends(self) -> None:
        assert data_files.blend(["A", "B", "C"]) == (["A", "B", "C"], None)
        assert data_files.blend(["0.3", "A", "0.7", "B"]) == (["A", "B"], [0.3, 0.7])
        with pytest.raises(ValueError, match="a weight before every prefix"):
            data_files.blend(["A", "B", "0.5", "C"])
