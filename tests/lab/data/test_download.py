"""Downloads from a server on the loopback interface: whole, cut, resumed, wrong, and by several at once."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import requests
from tests.lab.data import writers
from tests.lab.data.server import Server, serving

from ocnopt.lab.data import ChecksumError, DownloadError, MissingDataError, check, fetch, load, registry
from ocnopt.lab.data.download import BrokenTransfer, ResumingDownloader, download
from ocnopt.lab.data.errors import TransferError
from ocnopt.lab.data.registry import Remote

Publish = Callable[..., None]

NOBODY = "http://127.0.0.1:9/"
CONTENT = np.random.default_rng(0).bytes(1_000_000)


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        running.files["set.bin"] = CONTENT
        yield running


def remote_of(server: Server, checksum: str | None = None) -> Remote:
    return Remote("set.bin", (server.url + "set.bin",), checksum or sha256(CONTENT), "toy")


def get(remote: Remote, root: Path, replace: bool = False) -> Path:
    (path,) = download(remote, root, lambda path: None, replace=replace, pause=0.001)
    return path


def leftovers(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir())


def test_a_file_is_fetched_once_and_checked(tmp_path: Path, server: Server) -> None:
    for _ in range(2):
        assert get(remote_of(server), tmp_path).read_bytes() == CONTENT
    assert server.requests == [("set.bin", None)]
    assert leftovers(tmp_path / "toy") == ["set.bin"]


def test_a_cut_transfer_goes_on_where_it_stopped(tmp_path: Path, server: Server) -> None:
    server.cuts = [300_000, 200_000]
    assert get(remote_of(server), tmp_path).read_bytes() == CONTENT
    ranges = [asked for _, asked in server.requests]
    assert ranges == [None, "bytes=300000-", "bytes=500000-"]


def test_a_new_process_goes_on_with_what_a_killed_one_left(tmp_path: Path, server: Server) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "set.bin.part").write_bytes(CONTENT[:400_000])
    assert get(remote_of(server), tmp_path).read_bytes() == CONTENT
    assert server.requests == [("set.bin", "bytes=400000-")]
    assert leftovers(tmp_path / "toy") == ["set.bin"]


def test_after_too_many_cuts_the_part_is_kept_for_the_next_call(tmp_path: Path, server: Server) -> None:
    server.cuts = [100_000] * 5
    with pytest.raises(DownloadError, match=r"set\.bin could not be downloaded: the connection broke"):
        get(remote_of(server), tmp_path)
    assert leftovers(tmp_path / "toy") == ["set.bin.part"]
    assert get(remote_of(server), tmp_path).read_bytes() == CONTENT
    assert server.requests[-1] == ("set.bin", "bytes=500000-")


def test_a_wrong_checksum_is_never_kept(tmp_path: Path, server: Server) -> None:
    wrong = sha256(b"something else")
    with pytest.raises(ChecksumError, match=f"does not have the official checksum {wrong} and was not kept"):
        get(remote_of(server, wrong), tmp_path)
    assert leftovers(tmp_path / "toy") == []
    assert len(server.requests) == 1  # nothing was resumed, so there is no reason to try again


def test_a_stale_part_is_thrown_away_and_the_file_fetched_from_the_start(tmp_path: Path, server: Server) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "set.bin.part").write_bytes(b"\0" * 400_000)
    assert get(remote_of(server), tmp_path).read_bytes() == CONTENT
    assert [asked for _, asked in server.requests] == ["bytes=400000-", None]


@pytest.mark.parametrize("size", [1_000_000, 2_000_000])
def test_a_part_that_is_as_long_as_the_file_or_longer(tmp_path: Path, server: Server, size: int) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "set.bin.part").write_bytes(b"\0" * size)
    assert get(remote_of(server), tmp_path).read_bytes() == CONTENT


def test_a_server_that_knows_no_ranges_starts_again(tmp_path: Path, server: Server) -> None:
    server.knows_ranges = False
    server.cuts = [300_000]
    assert get(remote_of(server), tmp_path).read_bytes() == CONTENT
    assert len(server.requests) == 2


def test_a_server_that_sends_another_range_is_not_believed(tmp_path: Path, server: Server) -> None:
    server.range_shift = 7
    server.cuts = [300_000]
    # without a checksum, which would notice it too
    assert get(replace(remote_of(server), checksum=None), tmp_path).read_bytes() == CONTENT
    assert [asked for _, asked in server.requests] == [None, "bytes=300000-", None]


def test_a_server_that_does_not_say_the_length_is_caught_by_the_checksum(tmp_path: Path, server: Server) -> None:
    server.says_length = False
    server.cuts = [300_000]
    with pytest.raises(ChecksumError):
        get(remote_of(server), tmp_path)
    assert get(remote_of(server), tmp_path).read_bytes() == CONTENT


def test_a_short_body_that_the_http_library_lets_pass_is_noticed(tmp_path: Path) -> None:
    class Raw(io.BytesIO):
        def read(self, size: int | None = -1, decode_content: bool | None = None) -> bytes:
            return super().read(size)

    response = requests.Response()
    response.raw, response.headers["Content-Length"] = Raw(CONTENT[:1000]), "1001"
    with pytest.raises(BrokenTransfer, match="only 1000 of 1001 bytes arrived"):
        ResumingDownloader(tmp_path / "set.bin")._write(response, 0)


@pytest.mark.parametrize("calls_it_gzip", [False, True])
def test_compressed_files_arrive_as_they_are(tmp_path: Path, server: Server, calls_it_gzip: bool) -> None:
    server.calls_it_gzip = calls_it_gzip
    packed = gzip.compress(CONTENT[:1000])
    server.files["set.bin"] = packed
    assert get(remote_of(server, sha256(packed)), tmp_path).read_bytes() == packed


def test_a_busy_server_is_asked_again_but_a_404_is_final(tmp_path: Path, server: Server) -> None:
    server.statuses = [503, 503]
    assert get(remote_of(server), tmp_path).read_bytes() == CONTENT
    assert len(server.requests) == 3
    gone = replace(remote_of(server), urls=(server.url + "gone.bin",), filename="gone.bin")
    with pytest.raises(DownloadError, match="could not be downloaded: the server answered 404 "):
        get(gone, tmp_path)
    assert len(server.requests) == 4


def test_mirrors_are_tried_in_turn_and_a_wrong_checksum_is_the_better_message(tmp_path: Path, server: Server) -> None:
    urls = (server.url + "gone.bin", server.url + "set.bin")
    assert get(replace(remote_of(server), urls=urls), tmp_path).read_bytes() == CONTENT
    wrong = replace(remote_of(server, sha256(b"")), filename="other.bin", urls=urls[::-1])
    with pytest.raises(ChecksumError):
        get(wrong, tmp_path)


def test_no_server_at_all_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote("set.bin", (f"{NOBODY}set.bin",), sha256(CONTENT), "toy")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("there is nothing to wait for"))
    with pytest.raises(TransferError) as caught:
        get(remote, tmp_path)
    assert str(caught.value) == f"{NOBODY}set.bin could not be downloaded: the server cannot be reached from here."
    assert leftovers(tmp_path / "toy") == []


def test_data_that_is_neither_found_nor_sent_is_the_sentence_of_missing_data(
    tmp_path: Path, cache: Path, publish: Publish
) -> None:
    publish("SVHN", remotes=tuple(replace(r, urls=(NOBODY + r.filename,)) for r in registry.ENTRIES["SVHN"].remotes))
    with pytest.raises(MissingDataError) as caught:
        load("SVHN", tmp_path, download=True)
    assert str(caught.value) == (
        f"SVHN was not found in {tmp_path}, {cache} (no such folder), and {NOBODY}train_32x32.mat could not be "
        f"downloaded: the server cannot be reached from here: put train_32x32.mat and test_32x32.mat from {NOBODY} "
        f"into {tmp_path / 'svhn'}, name another folder with --data-dir or OCNOPT_DATA, "
        "or run `ocnopt data fetch SVHN`."
    )


def test_a_file_with_a_wrong_checksum_is_not_called_missing(tmp_path: Path, server: Server, publish: Publish) -> None:
    publish("SVHN", remotes=(replace(remote_of(server, sha256(b"something else")), folder="svhn"),))
    with pytest.raises(ChecksumError):
        load("SVHN", tmp_path, download=True)


def test_several_at_once_fetch_the_file_once(tmp_path: Path, server: Server) -> None:
    gate = threading.Event()
    server.before_body = lambda: gate.wait(5) and None
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(get, remote_of(server), tmp_path) for _ in range(4)]
        gate.set()
        assert all(job.result().read_bytes() == CONTENT for job in jobs)
    assert len(server.requests) == 1


def test_a_file_of_the_user_is_not_replaced_unless_asked(tmp_path: Path, server: Server) -> None:
    own = tmp_path / "toy" / "set.bin"
    own.parent.mkdir()
    own.write_bytes(b"my own")
    with pytest.raises(DownloadError, match="is not the official file and is left alone"):
        get(remote_of(server), tmp_path)
    assert own.read_bytes() == b"my own"
    assert server.requests == []
    assert get(remote_of(server), tmp_path, replace=True).read_bytes() == CONTENT


def archive_of(server: Server) -> Remote:
    stream = io.BytesIO()
    path = Path("archive.tar.gz")
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name in ("data/power/data.npy", "data/gas/one", "data/miniboone/two", "data/other"):
            info = tarfile.TarInfo(name)
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()))
    server.files[path.name] = stream.getvalue()
    return Remote(
        path.name,
        (server.url + path.name,),
        sha256(stream.getvalue()),
        "maf",
        members=(("gas/one", "gas/one"), ("miniboone/two", "miniboone/two")),
    )


def test_what_is_wanted_is_taken_out_of_an_archive_and_the_archive_deleted(tmp_path: Path, server: Server) -> None:
    remote = archive_of(server)
    for _ in range(2):
        paths = download(remote, tmp_path, lambda path: None)
        assert [p.relative_to(tmp_path).as_posix() for p in paths] == ["gas/one", "miniboone/two"]
        assert [p.read_text() for p in paths] == ["data/gas/one", "data/miniboone/two"]
    assert len(server.requests) == 1
    assert leftovers(tmp_path / "maf") == []
    (tmp_path / "gas" / "one").write_text("my own")
    (tmp_path / "miniboone" / "two").unlink()
    download(remote, tmp_path, lambda path: None)
    assert (tmp_path / "gas" / "one").read_text() == "my own"
    assert (tmp_path / "miniboone" / "two").exists()


def test_an_archive_that_lacks_a_member_is_named(tmp_path: Path, server: Server) -> None:
    remote = replace(archive_of(server), members=(("gas/none", "gas/none"),))
    with pytest.raises(DownloadError, match=r"archive\.tar\.gz does not hold gas/none"):
        download(remote, tmp_path, lambda path: None)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_progress_bar_is_shown_on_a_terminal_only(
    tmp_path: Path,
    server: Server,
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    ResumingDownloader(tmp_path / "set.bin")(server.url + "set.bin", str(tmp_path / "set.bin"), None)
    shown = capsys.readouterr()
    assert ("set.bin" in shown.err) == terminal
    assert ("1.0/1.0 MB" in shown.err) == terminal
    assert shown.out == ""


# ---- fetch and load, from the table


def publish_mnist(publish: Publish, server: Server) -> None:
    remotes = []
    for remote, array in zip(registry.ENTRIES["MNIST"].remotes, writers.idx_arrays(), strict=True):
        content = gzip.compress(writers.idx_bytes(array))
        server.files[remote.filename] = content
        remotes.append(replace(remote, urls=(server.url + remote.filename,), checksum=sha256(content)))
    publish("MNIST", remotes=tuple(remotes))


def test_load_downloads_into_the_cache_when_asked_and_only_then(cache: Path, server: Server, publish: Publish) -> None:
    publish_mnist(publish, server)
    with pytest.raises(FileNotFoundError):
        load("MNIST")
    assert server.requests == []
    assert len(load("MNIST", download=True).train) == 20
    assert (cache / "mnist" / writers.IDX_NAMES[0]).exists()
    assert len(server.requests) == 4
    assert len(load("MNIST", download=True).train) == 20
    assert len(server.requests) == 4


def test_fetch_goes_to_the_named_folder_and_never_to_the_shared_one(
    tmp_path: Path, cache: Path, server: Server, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_mnist(publish, server)
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("OCNOPT_DATA", str(shared))
    rows = fetch("mnist")
    assert list(shared.iterdir()) == []
    assert [Path(row.path).parent for row in rows] == [cache / "mnist"] * 4
    assert {(row.name, row.status, row.checked) for row in rows} == {("MNIST", "downloaded", "sha256")}
    rows = fetch("MNIST")
    assert {(row.status, row.checked) for row in rows} == {("present", "not checked")}
    rows = fetch("MNIST", tmp_path / "named", force=True)
    assert [Path(row.path).parent for row in rows] == [tmp_path / "named" / "mnist"] * 4
    assert [row.bytes for row in rows] == [Path(row.path).stat().st_size for row in rows]
    asked = len(server.requests)
    fetch("MNIST", tmp_path / "named", force=True)  # official files are not fetched again
    assert len(server.requests) == asked


def test_fetching_what_is_built_in_is_no_error() -> None:
    (row,) = fetch("WINE")
    assert (row.status, row.path, row.bytes) == ("built in", "", 0)


UEA = "ArticularyWordRecognition"


def uea_zip(train: int, test: int) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for part, count in (("TRAIN", train), ("TEST", test)):
            member = zipfile.ZipInfo(f"{UEA}_{part}.ts")  # without the time of day: the same bytes whenever it is made
            archive.writestr(member, writers.ts_text(["1,2:3,4:up"] * count))
    return stream.getvalue()


@pytest.fixture
def uea(server: Server, publish: Publish) -> Server:
    """The archive without a published checksum; its complete set has 2 and 3 series here."""
    (remote,) = registry.ENTRIES[UEA].remotes
    remotes = (replace(remote, urls=(server.url + f"{UEA}.zip",)),)
    publish(UEA, remotes=remotes, sizes=(2, 0, 3), input_shape=(2, 2), classes=2)
    server.files[f"{UEA}.zip"] = uea_zip(2, 3)
    return server


def test_a_file_without_a_published_checksum_is_checked_by_its_content(uea: Server, cache: Path) -> None:
    (row,) = fetch(UEA)
    assert row.checked == "content"
    folder = cache / "uea" / UEA
    assert leftovers(folder) == [f"{UEA}.zip", f"{UEA}.zip.sha256"]
    digest = hashlib.sha256(uea.files[f"{UEA}.zip"]).hexdigest()
    assert (folder / f"{UEA}.zip.sha256").read_text() == f"{digest}  {UEA}.zip\n"
    data = load(UEA)
    assert (len(data.train), len(data.test), data.subset) == (2, 3, False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (uea_zip(2, 2), "2 train, 2 test instead of the 2 train, 3 test"),
        (uea_zip(2, 3)[:-40], "damaged or cut short"),
        (b"<html>Under maintenance</html>", "damaged or cut short"),
    ],
)
def test_wrong_content_is_not_kept(uea: Server, cache: Path, content: bytes, message: str) -> None:
    uea.files[f"{UEA}.zip"] = content
    with pytest.raises(DownloadError, match=message):
        fetch(UEA)
    assert leftovers(cache / "uea" / UEA) == []


def test_a_file_that_changed_after_its_download_is_noticed_by_check(uea: Server, cache: Path) -> None:
    fetch(UEA)
    assert "changed" not in check(UEA).message
    (cache / "uea" / UEA / f"{UEA}.zip").write_bytes(uea_zip(2, 3) + b"\0" * 3)
    row = check(UEA)
    assert row.status == "broken"
    assert f"{UEA}.zip has changed since it was downloaded." in row.message


def test_an_own_archive_of_the_user_is_never_deleted(uea: Server, cache: Path) -> None:
    own = cache / "uea" / UEA / f"{UEA}.zip"
    own.parent.mkdir(parents=True)
    own.write_bytes(uea_zip(1, 1))
    (row,) = fetch(UEA)
    assert row.status == "present"
    uea.files[f"{UEA}.zip"] = b"<html>"
    with pytest.raises(DownloadError):
        fetch(UEA, force=True)
    assert own.read_bytes() == uea_zip(1, 1)


def test_gas_and_miniboone_come_from_one_archive(tmp_path: Path, server: Server, publish: Publish) -> None:
    stream = io.BytesIO()
    np.save(stream, np.random.default_rng(0).normal(size=(200, 43)))
    frame = writers.frame_of_2017(np.random.default_rng(1).normal(size=(200, 5)), ["Time", "Meth", "Eth", "a", "b"])
    path = tmp_path / "data.tar.gz"
    members = {"data/gas/ethylene_CO.pickle": frame, "data/miniboone/data.npy": stream.getvalue()}
    writers.write_tar(path, members)
    content = path.read_bytes()
    path.unlink()
    server.files["data.tar.gz"] = content
    (remote,) = registry.ENTRIES["Gas"].remotes
    md5 = f"md5:{hashlib.md5(content).hexdigest()}"
    remotes = (replace(remote, urls=(server.url + "data.tar.gz",), checksum=md5),)
    for name in ("Gas", "Miniboone"):
        publish(name, remotes=remotes)
    (row,) = fetch("Gas", tmp_path)
    assert (Path(row.path), row.checked) == (tmp_path / "gas" / "ethylene_CO.pickle", "md5")
    assert load("Gas", tmp_path).input_shape == (2,)
    assert len(load("Miniboone", tmp_path, download=True).test) == 20
    assert len(server.requests) == 1
