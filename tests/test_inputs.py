"""Inputs of predict and embed: files, folders, globs, archives and standard input; hostile archives."""

import bz2
import io
import struct
import subprocess
import tarfile
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest
from pictures import encode, jpeg, noise, plant, png, write_parquet, write_tar

from plainvit.data import sources
from plainvit.data.decode import DataError, ImageError
from plainvit.data.sources import Source
from plainvit.evaluate import inputs

NAMES = ["0.jpg", "1.jpg", "4.PNG", "6.gif", "sub/3.png"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    files = {"0.jpg": jpeg(0), "1.jpg": jpeg(1), "4.PNG": png(4), "6.gif": encode(noise(5, 5), "GIF")}
    files |= {"sub/3.png": png(3), "readme.txt": b"no image", ".hidden.jpg": jpeg(9)}
    return plant(tmp_path / "photos", files)


def names(source: Source) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def write_zip(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members:
            file.writestr(name, data)
    return path


def test_a_folder_is_read_in_order(photos: Path) -> None:
    found = inputs.find([str(photos)])
    assert names(found) == [f"{photos}/{name}" for name in NAMES]
    assert all(found.read(at) == (photos / name).read_bytes() for at, name in enumerate(NAMES))


def test_globs_match_only_images_and_each_once(photos: Path) -> None:
    assert names(inputs.find([f"{photos}/**/*"])) == [f"{photos}/{name}" for name in NAMES]
    assert names(inputs.find([f"{photos}/[01].*"])) == [f"{photos}/0.jpg", f"{photos}/1.jpg"]
    assert names(inputs.find([f"{photos}/s*"])) == [f"{photos}/sub/3.png"]


@pytest.mark.parametrize(("kind", "write"), [("zip", write_zip), ("tar", write_tar)])
def test_archives_are_read_in_any_order(photos: Path, kind: str, write: object) -> None:
    members = [(name, (photos / name).read_bytes()) for name in (*NAMES, "readme.txt", ".hidden.jpg")]
    path = write(photos.parent / f"all.{kind}", members)  # pyright: ignore
    found = inputs.find([str(path)])
    assert names(found) == [f"{path}/{name}" for name in NAMES]
    backwards = [found.read(at) for at in reversed(range(len(found)))]
    assert backwards == [(photos / name).read_bytes() for name in reversed(NAMES)]


def test_names_are_read_from_standard_input_and_invalid_ones_are_rows(photos: Path) -> None:
    (photos.parent / "empty").mkdir()
    (photos.parent / "bad.zip").write_bytes(b"PK")
    lines = [f"{photos}/1.jpg\n", f"{photos}/nothing.jpg\r\n", "\n", f"{photos.parent}/empty\n"]
    lines += [f"{photos.parent}/bad.zip\n", f"{photos}/sub"]
    found = inputs.find(["-"], lines=[line.encode() for line in lines])
    assert [Path(name).name for name in names(found)] == ["1.jpg", "nothing.jpg", "empty", "bad.zip", "3.png"]
    for index in (1, 2, 3):
        with pytest.raises(ImageError):
            found.read(index)


def test_names_on_standard_input_may_be_separated_by_zero_bytes(tmp_path: Path) -> None:
    plant(tmp_path, {"a.png": png(1), "two\nlines.png": png(2)})
    given = subprocess.run(["find", str(tmp_path), "-type", "f", "-print0"], capture_output=True, check=True).stdout
    found = inputs.find(["-"], lines=io.BytesIO(given))
    assert sorted(names(found)) == [f"{tmp_path}/a.png", f"{tmp_path}/two\nlines.png"]


def test_a_closed_standard_input_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """sys.stdin is None after `<&-`."""
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(DataError, match="no images"):
        inputs.find(["-"])


def test_a_broken_link_is_a_row_with_an_error(photos: Path) -> None:
    (photos / "3.jpg").symlink_to("nowhere.jpg")
    (photos / "circle.jpg").symlink_to("circle.jpg")
    for word in (str(photos), f"{photos}/**/*"):
        found = inputs.find([word])
        broken = [at for at, name in enumerate(names(found)) if Path(name).is_symlink()]
        assert len(broken) == 2
        for at in broken:
            with pytest.raises(ImageError):
                found.read(at)


def test_inputs_keep_their_order_and_repetitions(photos: Path) -> None:
    archive = write_tar(photos.parent / "one.tar", [("x.png", png())])
    words = [f"{photos}/1.jpg", str(archive), f"{photos}/0.jpg", f"{photos}/1.jpg"]
    expected = [f"{photos}/1.jpg", f"{archive}/x.png", f"{photos}/0.jpg", f"{photos}/1.jpg"]
    assert names(inputs.find(words)) == expected


@pytest.mark.parametrize("word", ["nothing.jpg", "nothing", "no/*.jpg"])
def test_an_absent_input_is_a_data_error(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="file"):
        inputs.find([word])


def test_the_fingerprint_changes_with_files_archives_and_datasets(photos: Path, tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "x.tar", [("a.png", png(0))])
    images = [png(seed) for seed in range(100)]
    parquet = tmp_path / "data" / "test-00000-of-00001.parquet"
    parquet.parent.mkdir()
    write_parquet(parquet, images, [0] * 100)
    words = [str(photos), str(archive), str(parquet.parent)]
    stamps = [inputs.find(words).fingerprint(), inputs.find(words).fingerprint()]
    (photos / "0.jpg").write_bytes(jpeg(77))
    stamps.append(inputs.find(words).fingerprint())
    write_tar(archive, [("a.png", png(1))])
    stamps.append(inputs.find(words).fingerprint())
    write_parquet(parquet, [*images[:37], png(777), *images[38:]], [0] * 100)
    stamps.append(inputs.find(words).fingerprint())
    assert stamps[0] == stamps[1]
    assert len(set(stamps)) == 4


# Hostile archives -----------------------------------------------------------------------------------------------------


def test_members_with_parent_or_absolute_paths_write_no_files(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    members = [("../../out.png", png(1)), ("/tmp/plainvit-absolute.png", png(2))]
    for path in (write_tar(inner / "x.tar", members), write_zip(inner / "x.zip", members)):
        found = inputs.find([str(path)])
        assert [found.read(0), found.read(1)] == [png(1), png(2)]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["x.tar", "x.zip"]
    assert not Path("/tmp/plainvit-absolute.png").exists()


def test_links_in_a_tar_only_reach_its_own_images_and_devices_are_errors(tmp_path: Path) -> None:
    links = [
        ("in/l.png", tarfile.LNKTYPE, "./in/good.png"),
        ("in/s.png", tarfile.SYMTYPE, "good.png"),
        ("s.png", tarfile.SYMTYPE, "in/./s.png"),
        ("p.png", tarfile.FIFOTYPE, "in/good.png"),
        ("in/lost.l.png", tarfile.LNKTYPE, "/etc/passwd"),
        ("in/lost.s.png", tarfile.SYMTYPE, "../../good.png"),
        ("c.png", tarfile.CHRTYPE, "in/good.png"),
    ]
    with tarfile.open(tmp_path / "x.tar", "w") as file:
        member = tarfile.TarInfo("./in/good.png")
        member.size = len(png())
        file.addfile(member, io.BytesIO(png()))
        for name, kind, target in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            file.addfile(member)
    found = inputs.find([str(tmp_path / "x.tar")])
    assert len(found) == 8
    assert [found.read(at) for at in range(4)] == [png()] * 4
    for at in range(4, 8):
        with pytest.raises(ImageError):
            found.read(at)


def lying_zip(path: Path, method: int, packed: bytes) -> Path:
    """A zip whose member claims 1,000 bytes and this compression method."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.png", packed)
    data = bytearray(path.read_bytes())
    for mark, kind, size in ((b"PK\3\4", 8, 22), (b"PK\1\2", 10, 24)):
        start = data.index(mark)
        struct.pack_into("<H", data, start + kind, method)
        struct.pack_into("<I", data, start + size, 1000)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", ["deflate", "bzip2"])
def test_a_zip_member_is_not_unpacked_beyond_its_stated_size(tmp_path: Path, kind: str) -> None:
    zeros, deflate = bytes(32 * 2**20), zlib.compressobj(wbits=-15)
    packed = bz2.compress(zeros) if kind == "bzip2" else deflate.compress(zeros) + deflate.flush()
    found = inputs.find([str(lying_zip(tmp_path / "x.zip", 12 if kind == "bzip2" else 8, packed))])
    del zeros
    tracemalloc.start()
    with pytest.raises(ImageError):
        found.read(0)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4 * 2**20


def test_a_huge_tar_header_is_not_read(tmp_path: Path) -> None:
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 6 * 2**30
    (tmp_path / "x.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(DataError, match="header has 6,442,450,944"):
        inputs.find([str(tmp_path / "x.tar")])


def test_members_and_files_over_the_limit_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, {"x.png": png()})
    write_tar(tmp_path / "x.tar", [("x.png", png())])
    write_zip(tmp_path / "x.zip", [("x.png", png())])
    monkeypatch.setattr(sources, "FILE_LIMIT", len(png()) - 1)
    for name in ("x.png", "x.tar", "x.zip"):
        with pytest.raises(ImageError, match="limit"):
            inputs.find([str(tmp_path / name)]).read(0)


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_a_truncated_or_compressed_archive_is_a_data_error(tmp_path: Path, kind: str) -> None:
    members = [(f"{seed}.png", png(seed)) for seed in range(20)]
    path = (write_zip if kind == "zip" else write_tar)(tmp_path / f"x.{kind}", members)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=str(path)):
        inputs.find([str(path)])


def test_a_corrupt_or_encrypted_zip_member_is_an_error(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", [("x.png", png())])
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") - 20] ^= 255  # its checksum no longer holds
    path.write_bytes(data)
    with pytest.raises(ImageError):
        inputs.find([str(path)]).read(0)
    data[data.index(b"PK\1\2") + 8] |= 1  # and now it asks for a password
    path.write_bytes(data)
    with pytest.raises(ImageError, match=r"encrypted|password"):
        inputs.find([str(path)]).read(0)
