"""Prepared TFDS folders, written here by tfds itself, read without TensorFlow."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtool.errors import BadData
from llmtool.evaluate.data import load_boolq, load_lambada
from llmtool.evaluate.items import items_sha256
from llmtool.evaluate.tfds_folder import _records, crc32c

PASSAGES = ["he said “no” twice\n", "café au lait\n", "the third one"]
QUESTIONS = [("is it wet", "Rain -- Rain is water.", 1), ("is it dry", "Sand -- Sand is dry.", 0)]
# two records as tensorboardX 2.6.5 writes them: b"two words" and b""
FOREIGN = bytes.fromhex("090000000000000037f9713974776f20776f7264737fe7e43d000000000000000029039807d8ea82a2")


@pytest.fixture
def prepare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str, str], Path]:
    """Prepare a data set with the features and splits of the real one of that name; its version's folder.

    tfrecord, which tfds cannot write without TensorFlow, is array_record's folder with the same examples anew.
    """
    def run(name: str, form: str) -> Path:
        import tensorflow_datasets as tfds

        features, splits = _contents(name)

        class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
            VERSION = tfds.core.Version("1.0.2")
            BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="boolq")] if name == "super_glue" else []
            code_path = None  # to look for it, tfds wants a package that it does not require

            def _info(self) -> Any:
                return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

            def _split_generators(self, dl_manager: Any) -> Any:
                return {split: enumerate(rows) for split, rows in splits.items()}

            def _generate_examples(self) -> None: ...

        Builder.name = name
        builder = Builder(data_dir=tmp_path, file_format="array_record" if form == "tfrecord" else form)
        builder.download_and_prepare()
        folder = Path(builder.data_dir)
        if form == "tfrecord":
            from tensorflow_datasets.core.example_serializer import ExampleSerializer

            serializer = ExampleSerializer(builder.info.features.get_serialized_info())
            for split, rows in splits.items():
                encoded = [serializer.serialize_example(builder.info.features.encode_example(row)) for row in rows]
                file, = folder.glob(f"*-{split}.array_record-*")
                file.unlink()
                (folder / file.name.replace("array_record", "tfrecord")).write_bytes(b"".join(map(record, encoded)))
            change_info(folder, fileFormat="tfrecord")
        capsys.readouterr()
        return folder
    return run


def _contents(name: str) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Features and rows."""
    import numpy as np
    import tensorflow_datasets as tfds

    text = tfds.features.Text()
    if name == "lambada":
        return {"passage": text}, {"train": [{"passage": "only to train"}],
                                   "test": [{"passage": passage} for passage in PASSAGES]}
    if name == "bool_q":
        rows = [dict(zip(("title", "passage"), passage.split(" -- "), strict=True)) | {"question": question,
                "answer": bool(answer)} for question, passage, answer in QUESTIONS]
        return {"question": text, "passage": text, "title": text, "answer": np.bool_}, {"validation": rows}
    rows = [{"question": question, "passage": passage, "idx": i, "label": answer}
            for i, (question, passage, answer) in enumerate(QUESTIONS)]
    label = tfds.features.ClassLabel(names=["False", "True"])
    return ({"question": text, "passage": text, "idx": np.int32, "label": label},
            {"validation": rows, "test": [row | {"label": -1} for row in rows]})


def change_info(folder: Path, **fields: Any) -> None:
    path = folder / "dataset_info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def record(data: bytes) -> bytes:
    """One TFRecord."""
    def masked(part: bytes) -> bytes:
        crc = crc32c(part)
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


@pytest.mark.parametrize("form", ["array_record", "parquet", "tfrecord"])
def test_lambada_in_any_format(form: str, prepare) -> None:
    folder = prepare("lambada", form)
    data = load_lambada(folder)
    assert sorted(item.text for item in data.items) == sorted(text.strip() for text in PASSAGES)
    assert data.counts == {"curly_quotes": 1}
    assert "tfds lambada 1.0.2, test" in data.source
    assert data.sha256 == items_sha256(data.items)
    for above in (folder.parent, folder.parent.parent):
        assert load_lambada(above).items == data.items


@pytest.mark.parametrize("form", ["array_record", "parquet", "tfrecord"])
def test_boolq_in_any_format(form: str, prepare) -> None:
    superglue = load_boolq(prepare("super_glue", form))
    google = load_boolq(prepare("bool_q", form))
    expected = sorted((passage, question, bool(answer)) for question, passage, answer in QUESTIONS)
    for data, variant in ((superglue, "superglue"), (google, "google")):
        assert sorted((item.passage, item.question, item.answer) for item in data.items) == expected
        assert data.variant == variant


def test_the_newest_version_is_read(prepare) -> None:
    folder = prepare("lambada", "array_record")
    (folder.parent / "0.9.0").mkdir()
    (folder.parent / "0.9.0" / "dataset_info.json").write_text("{}")
    assert len(load_lambada(folder.parent).items) == 3


def test_labels_of_the_test_split_are_hidden(prepare) -> None:
    folder = prepare("super_glue", "tfrecord")
    (validation,), (test,) = (list(folder.glob(f"*-{split}.tfrecord-*")) for split in ("validation", "test"))
    test.replace(validation)
    with pytest.raises(BadData, match=r"validation 0: no target.*use\s*validation"):
        load_boolq(folder)


def test_a_split_that_is_not_there(prepare) -> None:
    with pytest.raises(BadData, match=r"no split 'validation'.*it has \['train', 'test'\]|no split 'validation'"):
        load_boolq(prepare("lambada", "array_record"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"splits": 3}'])
def test_a_damaged_dataset_info(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_bytes(content)
    with pytest.raises(BadData, match=r"dataset_info\.json: n"):
        load_lambada(tmp_path)


def test_a_format_that_tfds_does_not_read(prepare) -> None:
    folder = prepare("lambada", "array_record")
    change_info(folder, fileFormat="riegeli")
    with pytest.raises(BadData, match="riegeli"):
        load_lambada(folder)


def test_what_is_not_utf8(prepare) -> None:
    folder = prepare("lambada", "tfrecord")
    shard, = folder.glob("*-test.tfrecord-*")
    example = next(_records(shard))
    shard.write_bytes(record(example[:-1] + b"\xff"))
    with pytest.raises(BadData, match="not UTF-8"):
        load_lambada(folder)


@pytest.mark.parametrize("form", ["array_record", "parquet", "tfrecord"])
def test_a_missing_or_damaged_shard(form: str, prepare) -> None:
    folder = prepare("lambada", form)
    shard, = folder.glob(f"*-test.{form}-*")
    shard.write_bytes(shard.read_bytes()[:20])
    with pytest.raises(BadData):
        load_lambada(folder)
    shard.unlink()
    with pytest.raises(BadData):
        load_lambada(folder)


@pytest.mark.parametrize("form", ["array_record", "parquet", "tfrecord"])
def test_a_link_out_of_the_folder(form: str, prepare, tmp_path: Path) -> None:
    folder = prepare("lambada", form)
    shard, = folder.glob(f"*-test.{form}-*")
    outside = tmp_path / "outside"
    shard.rename(outside)
    shard.symlink_to(outside)
    with pytest.raises(BadData, match="outside the data set's folder"):
        load_lambada(folder)


# ── TFRecord ─────────────────────────────────────────────────────────────────────────────────────────────────────────

def test_crc32c() -> None:
    """RFC 3720, appendix B.4, and the check value of the catalogue of CRCs."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


def test_foreign_records(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(FOREIGN)
    assert list(_records(path)) == [b"two words", b""]
    assert record(b"two words") + record(b"") == FOREIGN


@pytest.mark.parametrize("at", range(25))
def test_every_bit_is_checked(at: int, tmp_path: Path) -> None:
    data = bytearray(FOREIGN[:25])
    data[at] ^= 4
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(BadData, match="record at byte 0"):
        list(_records(path))


@pytest.mark.parametrize("cut", range(1, 25))
def test_cut_off_records(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(FOREIGN[:cut])
    with pytest.raises(BadData, match="cut off"):
        list(_records(path))


def test_a_length_beyond_the_file_is_not_allocated(tmp_path: Path) -> None:
    length = struct.pack("<Q", 1 << 62)
    path = tmp_path / "x"
    path.write_bytes(length + record(length)[-4:] + b"abc")
    with pytest.raises(BadData, match=f"needs {1 << 62} more bytes, the file has 3"):
        list(_records(path))
