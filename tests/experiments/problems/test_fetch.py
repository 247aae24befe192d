"""Downloads from a server of our own, good and bad."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cabs.experiments.errors import CommandError, DataError
from cabs.experiments.files import open_alone, part_of
from cabs.experiments.problems.data import fetch as fetching
from cabs.experiments.problems.data.sources import Download, Source

CONTENT = bytes(range(256)) * 4000


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Server:
    """Files by path, and ways to be a bad server."""

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    break_off_after: int | None = None  # bytes, at the first request only
    requests: list[tuple[str, str | None]] = field(default_factory=list)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.requests.append((self.path, wanted))
            content = state.files.get(self.path.strip("/"))
            if content is None:
                self.send_error(404)
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and state.ranges else 0
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            cut, state.break_off_after = state.break_off_after, None
            self.wfile.write(content[start : None if cut is None else start + cut])

        def log_message(self, *_: object) -> None:
            pass

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(fetching.time, "sleep", lambda _: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.port = http.server_port
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        http.shutdown()
        thread.join()


def plain_source(server: Server, content: bytes = CONTENT, name: str = "file.mat") -> Source:
    server.files[name] = content
    download = Download(name=name, urls=(server.url(name),), size=len(content), sha256=sha256(content))
    return Source(
        name="some", title="Some", homepage="nowhere", downloads=(download,), train={name: sha256(content)}, test={}
    )


def run(source: Source, directory: Path, **options: bool) -> list[int]:
    seen: list[int] = []
    fetching.fetch(source, source.downloads[0], directory, seen.append, **options)
    return seen


def test_fetch_verifies_and_leaves_only_the_file(server: Server, tmp_path: Path) -> None:
    source = plain_source(server)
    progress = run(source, tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.mat"]
    assert (tmp_path / "new" / "file.mat").read_bytes() == CONTENT
    assert progress == sorted(progress)
    assert progress[-1] == len(CONTENT)
    assert fetching.is_fetched(source, source.downloads[0], tmp_path / "new")


def test_a_broken_transfer_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    source = plain_source(server)
    server.break_off_after = 300_000
    run(source, tmp_path)
    assert (tmp_path / "file.mat").read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, "bytes=300000-"]


def test_an_earlier_attempt_is_gone_on_with(server: Server, tmp_path: Path) -> None:
    source = plain_source(server)
    part_of(tmp_path / "file.mat").write_bytes(CONTENT[:1000])
    run(source, tmp_path)
    assert server.requests[0][1] == "bytes=1000-"
    assert (tmp_path / "file.mat").read_bytes() == CONTENT


def test_a_server_without_ranges_sends_it_all_again(server: Server, tmp_path: Path) -> None:
    source = plain_source(server)
    server.ranges = False
    part_of(tmp_path / "file.mat").write_bytes(b"rubbish")
    run(source, tmp_path)
    assert (tmp_path / "file.mat").read_bytes() == CONTENT


def test_a_complete_part_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    source = plain_source(server)
    part_of(tmp_path / "file.mat").write_bytes(CONTENT)
    run(source, tmp_path)
    assert server.requests == []
    assert (tmp_path / "file.mat").read_bytes() == CONTENT


@pytest.mark.parametrize("served", [b"x" * len(CONTENT), CONTENT + b"more"])
def test_wrong_contents_never_get_the_files_name(server: Server, tmp_path: Path, served: bytes) -> None:
    source = plain_source(server)
    server.files["file.mat"] = served
    with pytest.raises(CommandError, match=r"file\.mat could not be fetched"):
        run(source, tmp_path)
    assert not (tmp_path / "file.mat").exists()


def test_the_next_address_is_tried(server: Server, tmp_path: Path) -> None:
    source = plain_source(server)
    download = replace(source.downloads[0], urls=(server.url("gone"), server.url("file.mat")))
    fetching.fetch(source, download, tmp_path, lambda _: None)
    assert [path for path, _ in server.requests] == ["/gone", "/file.mat"]
    assert (tmp_path / "file.mat").read_bytes() == CONTENT


def test_no_server_says_so_and_what_to_do(tmp_path: Path, server: Server) -> None:
    source = plain_source(server)
    download = replace(source.downloads[0], urls=("http://127.0.0.1:9/file.mat",))
    with pytest.raises(CommandError, match="--data"):
        fetching.fetch(source, download, tmp_path, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_not_overwritten_unasked(server: Server, tmp_path: Path) -> None:
    source = plain_source(server)
    (tmp_path / "file.mat").write_bytes(b"mine")
    with pytest.raises(CommandError, match="--force"):
        run(source, tmp_path)
    assert (tmp_path / "file.mat").read_bytes() == b"mine"
    run(source, tmp_path, force=True)
    assert (tmp_path / "file.mat").read_bytes() == CONTENT


def test_the_same_contents_compressed_otherwise_count_as_fetched(server: Server, tmp_path: Path) -> None:
    source = plain_source(server, gzip.compress(CONTENT, mtime=1), "file.gz")
    source = replace(source, train={"file.gz": sha256(CONTENT)})
    (tmp_path / "file.gz").write_bytes(gzip.compress(CONTENT, 1, mtime=2))
    assert fetching.is_fetched(source, source.downloads[0], tmp_path)
    (tmp_path / "file.gz").write_bytes(gzip.compress(CONTENT[1:]))
    assert not fetching.is_fetched(source, source.downloads[0], tmp_path)
    (tmp_path / "file.gz").write_bytes(gzip.compress(CONTENT)[:-9])
    assert not fetching.is_fetched(source, source.downloads[0], tmp_path)


def test_two_fetches_do_not_mix(server: Server, tmp_path: Path) -> None:
    source = plain_source(server)
    with open_alone(part_of(tmp_path / "file.mat"), "it"), pytest.raises(CommandError, match="in use"):
        run(source, tmp_path)


def archive(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return buffer.getvalue()


def archive_source(server: Server, content: bytes) -> Source:
    server.files["all.tar.gz"] = content
    download = Download(
        name="all.tar.gz",
        urls=(server.url("all.tar.gz"),),
        size=len(content),
        sha256=sha256(content),
        members=("inside/train.bin", "inside/test.bin"),
    )
    return Source(
        name="some",
        title="Some",
        homepage="nowhere",
        folder="inside",
        downloads=(download,),
        train={"train.bin": sha256(b"train")},
        test={"test.bin": sha256(b"test")},
    )


def test_an_archive_gives_just_the_files_we_know(server: Server, tmp_path: Path) -> None:
    content = archive(
        {
            "../outside": b"harm",
            "/tmp/cabs-outside": b"harm",
            "inside/train.bin": b"train",
            "inside/test.bin": b"test",
            "inside/more": b"unused",
        },
        links={"inside/link": "/etc/passwd"},
    )
    source = archive_source(server, content)
    run(source, tmp_path / "some")
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert found == ["some/inside/test.bin", "some/inside/train.bin"]
    assert (tmp_path / "some/inside/train.bin").read_bytes() == b"train"
    assert fetching.is_fetched(source, source.downloads[0], tmp_path / "some")
    assert not Path("/tmp/cabs-outside").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (archive({"inside/train.bin": b"train"}), "cannot be unpacked"),
        (archive({"inside/train.bin": b"other", "inside/test.bin": b"test"}), "another checksum"),
        (archive({"inside/test.bin": b"test"}, links={"inside/train.bin": "/etc/passwd"}), "not an ordinary file"),
        (b"no archive at all", "cannot be unpacked"),
    ],
)
def test_a_bad_archive_leaves_no_bad_file_behind(server: Server, tmp_path: Path, content: bytes, expected: str) -> None:
    source = archive_source(server, content)
    with pytest.raises(DataError, match=expected):
        run(source, tmp_path)
    taken = tmp_path / "inside" / "train.bin"
    assert not taken.exists() or taken.read_bytes() == b"train"
    assert not (tmp_path / "inside" / "test.bin").exists()
