"""Inputs of predict and embed: files, folders, globs, datasets and standard input."""

import io
from pathlib import Path

import pytest
from pictures import encode, jpeg, names, noise, plant, png, write_parquet, write_tar

from plainvit.data import sources
from plainvit.data.decode import DataError, ImageError
from plainvit.evaluate import inputs

NAMES = ["0.jpg", "1.jpg", "4.PNG", "6.gif", "sub/3.png"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    files = {"0.jpg": jpeg(0), "1.jpg": jpeg(1), "4.PNG": png(4), "6.gif": encode(noise(5, 5), "GIF")}
    files |= {"sub/3.png": png(3), "readme.txt": b"no image", ".hidden.jpg": jpeg(9)}
    return plant(tmp_path / "photos", files)


def test_a_folder_is_read_in_order(photos: Path) -> None:
    found = inputs.find([str(photos)])
    assert names(found) == [f"{photos}/{name}" for name in NAMES]
    assert all(found.read(at) == (photos / name).read_bytes() for at, name in enumerate(NAMES))


def test_globs_match_only_images_and_each_once(photos: Path) -> None:
    assert names(inputs.find([f"{photos}/**/*"])) == [f"{photos}/{name}" for name in NAMES]
    assert names(inputs.find([f"{photos}/[01].*"])) == [f"{photos}/0.jpg", f"{photos}/1.jpg"]
    assert names(inputs.find([f"{photos}/s*"])) == [f"{photos}/sub/3.png"]


def give_stdin(patch: pytest.MonkeyPatch, text: str) -> None:
    patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_names_are_read_from_standard_input_and_invalid_ones_are_rows(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos.parent / "empty").mkdir()
    (photos.parent / "bad.zip").write_bytes(b"PK")
    lines = [f"{photos}/1.jpg\n", f"{photos}/nothing.jpg\r\n", "\n", f"{photos.parent}/empty\n"]
    lines += [f"{photos.parent}/bad.zip\n", f"{photos}/sub"]
    give_stdin(monkeypatch, "".join(lines))
    found = inputs.find(["-"])
    assert [Path(name).name for name in names(found)] == ["1.jpg", "nothing.jpg", "empty", "bad.zip", "3.png"]
    for index in (1, 2, 3):
        with pytest.raises(ImageError):
            found.read(index)


def test_names_on_standard_input_may_be_separated_by_zero_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `find -print0` writes them."""
    paths = [str(plant(tmp_path, {name: png()}) / name) for name in ("a.png", "two\nlines.png")]
    give_stdin(monkeypatch, "".join(f"{path}\0" for path in paths))
    assert names(inputs.find(["-"])) == paths


def test_a_closed_standard_input_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """sys.stdin is None after `<&-`."""
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(DataError, match="no images"):
        inputs.find(["-"])


def test_a_broken_link_that_matches_a_glob_is_a_row_with_an_error(photos: Path) -> None:
    (photos / "3.jpg").symlink_to("nowhere.jpg")
    found = inputs.find([f"{photos}/**/*"])
    with pytest.raises(ImageError):
        found.read(names(found).index(f"{photos}/3.jpg"))


def test_inputs_keep_their_order_and_repetitions(photos: Path) -> None:
    tars = write_tar(photos.parent / "tars" / "test-0.tar", [("x.png", png())]).parent
    words = [f"{photos}/1.jpg", str(tars), f"{photos}/0.jpg", f"{photos}/1.jpg"]
    expected = [f"{photos}/1.jpg", f"{tars}/x.png", f"{photos}/0.jpg", f"{photos}/1.jpg"]
    assert names(inputs.find(words)) == expected


@pytest.mark.parametrize("word", ["nothing.jpg", "nothing", "no/*.jpg"])
def test_an_absent_input_is_a_data_error(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="file"):
        inputs.find([word])


def test_the_fingerprint_changes_with_files_and_datasets(photos: Path, tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "tars" / "test-0.tar", [("a.png", png(0))])
    images = [png(seed) for seed in range(100)]
    parquet = tmp_path / "data" / "test-00000-of-00001.parquet"
    parquet.parent.mkdir()
    write_parquet(parquet, images, [0] * 100)
    words = [str(photos), str(archive.parent), str(parquet.parent)]
    stamps = [inputs.find(words).fingerprint(), inputs.find(words).fingerprint()]
    (photos / "0.jpg").write_bytes(jpeg(77))
    stamps.append(inputs.find(words).fingerprint())
    write_tar(archive, [("a.png", png(1))])
    stamps.append(inputs.find(words).fingerprint())
    write_parquet(parquet, [*images[:37], png(777), *images[38:]], [0] * 100)
    stamps.append(inputs.find(words).fingerprint())
    assert stamps[0] == stamps[1]
    assert len(set(stamps)) == 4


def test_files_over_the_limit_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, {"x.png": png()})
    write_tar(tmp_path / "tars" / "x.tar", [("x.png", png())])
    monkeypatch.setattr(sources, "FILE_LIMIT", len(png()) - 1)
    for word, split in ((tmp_path / "x.png", "test"), (tmp_path / "tars", "train")):
        with pytest.raises(ImageError):
            inputs.find([str(word)], split=split).read(0)


@pytest.mark.parametrize("name", ["x.zip", "x.tar", "x.tar.gz"])
def test_an_archive_must_be_unpacked(tmp_path: Path, name: str) -> None:
    plant(tmp_path, {name: b""})
    with pytest.raises(DataError, match="unpack"):
        inputs.find([str(tmp_path / name)])
