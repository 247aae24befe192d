"""Download the official files: resumed where a transfer broke off, verified, and put in place in one move."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from cabs._version import __version__
from cabs.experiments.errors import CommandError, DataError
from cabs.experiments.files import atomically, open_alone, part_of
from cabs.experiments.problems.data.sources import Download, Source

Progress = Callable[[int], None]
"""Told how many bytes of a download are there."""

_BLOCK = 1 << 18
_TIMEOUT = 30.0
_ATTEMPTS = 4
# What can go wrong between here and a server, and may go right the next time.
_NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _content_sha256(path: Path) -> str | None:
    """The SHA-256 of what a gzip file holds: the same contents may have been compressed again."""
    if path.suffix != ".gz":
        return None
    try:
        with gzip.open(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, EOFError, zlib.error):
        return None


def is_fetched(source: Source, download: Download, directory: Path) -> bool:
    """Whether what a download provides is in place and intact."""
    if not download.members:
        path = directory / download.name
        return path.is_file() and (
            sha256_of(path) == download.sha256 or _content_sha256(path) == source.files[download.name]
        )
    files = [directory / member for member in download.members]
    return all(path.is_file() and sha256_of(path) == source.files[path.name] for path in files)


def fetch(source: Source, download: Download, directory: Path, progress: Progress, *, force: bool = False) -> None:
    """Fetch one file, or one archive and take out of it what is needed.

    Args:
        source: The data set.
        download: Which of its downloads.
        directory: Where the data set's files go.
        progress: Told how far the transfer is.
        force: Replace files of the same name that have other contents.

    Raises:
        CommandError: If no server delivers the file, or files of other contents are in the way.
    """
    results = [directory / member for member in download.members] or [directory / download.name]
    in_the_way = [path for path in results if path.exists()]
    if in_the_way and not force:
        raise CommandError(
            f"{in_the_way[0]} is there with other contents than the official file's; it can be trained on as it is. "
            "To replace it, fetch with --force"
        )
    directory.mkdir(parents=True, exist_ok=True)
    part = part_of(directory / download.name)
    with open_alone(part, str(directory)) as file:
        try:
            _transfer(download, file, part, progress)
        except BaseException:
            if file.seek(0, 2) == 0:
                part.unlink()
            raise
        if download.members:
            _extract(source, download, part, directory)
            part.unlink()
        else:
            part.replace(directory / download.name)


def _transfer(download: Download, file: IO[bytes], part: Path, progress: Progress) -> None:
    """Fill the file from one address or the next, resuming after what is there."""
    troubles = []
    for url in download.urls:
        for attempt in range(_ATTEMPTS):
            try:
                _receive(url, download.size, file, progress)
            except _NETWORK_ERRORS as error:
                troubles.append(f"{url}: {error}")
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    break  # asking again would bring the same answer
                time.sleep(0.5 * attempt)
                continue
            file.flush()
            if sha256_of(part) == download.sha256:
                return
            troubles.append(f"{url}: what came has another checksum than the official file")
            file.truncate(0)
            break
    reasons = "\n  ".join(dict.fromkeys(troubles))
    raise CommandError(
        f"{download.name} could not be fetched:\n  {reasons}\n"
        "What arrived is kept, and the same command resumes there. Without a network, copy the file from "
        "elsewhere and point --data (or CABS_DATA) at its directory."
    )


def _receive(url: str, size: int, file: IO[bytes], progress: Progress) -> None:
    """Append the rest of a file to what is there of it."""
    have = file.seek(0, 2)
    if have >= size:
        if have == size:
            return
        file.truncate(0)
        have = 0
    headers = {"User-Agent": f"cabs/{__version__}"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT) as response:
        if have and response.status != 206:  # the server sends everything, not the rest
            file.truncate(0)
            have = 0
        progress(have)
        while block := response.read(_BLOCK):
            have += len(block)
            if have > size:
                raise http.client.HTTPException(f"sends more than the {size:,} bytes of the official file")
            file.write(block)
            progress(have)
    if have < size:
        raise http.client.HTTPException(f"broke off after {have:,} of {size:,} bytes")


def _extract(source: Source, download: Download, archive: Path, directory: Path) -> None:
    """Take the files we know out of an archive. What else it holds, and what paths it names, has no say."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in download.members:
                info = tar.getmember(member)
                content = tar.extractfile(info) if info.isreg() else None
                if content is None:
                    raise DataError(f"{download.name}: {member} is not an ordinary file in it")
                target = directory / member
                target.parent.mkdir(parents=True, exist_ok=True)
                with atomically(target) as file:
                    digest = hashlib.sha256()
                    while block := content.read(_BLOCK):
                        digest.update(block)
                        file.write(block)
                    if digest.hexdigest() != source.files[target.name]:
                        raise DataError(f"{download.name}: {member} in it has another checksum than the official file")
    except (tarfile.TarError, KeyError, EOFError, OSError) as error:
        raise DataError(f"{download.name}: cannot be unpacked: {error}") from error
