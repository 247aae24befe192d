"""A headless Chromium, driven over the WebDriver protocol with the standard library alone."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from base64 import b64decode
from pathlib import Path
from typing import Any, Self

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


class Browser:
    """A browser with one window, for a ``with`` block.

    Args:
        profile: An empty directory for the browser's own files.
        size: Width and height of the window.
    """

    def __init__(self, profile: Path, size: tuple[int, int]) -> None:
        assert CHROMIUM is not None
        assert DRIVER is not None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._base = f"http://127.0.0.1:{probe.getsockname()[1]}"
        port = self._base.rpartition(":")[2]
        self._driver = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        options = {
            "binary": CHROMIUM,
            "args": [*_FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"],
        }
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = ""
        try:
            self._wait_for_driver()
            answer = self._send("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        except BaseException:
            self._driver.kill()
            self._driver.wait()
            raise
        self._session = f"/session/{answer['sessionId']}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._send("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.wait(10)

    def _wait_for_driver(self) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                self._send("GET", "/status")
                return
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with self._opener.open(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, path: Path) -> None:
        self._send("POST", f"{self._session}/url", {"url": path.as_uri()})

    def run(self, script: str) -> Any:
        """The value of a script, or of the promise that it returns."""
        wrapped = (
            "const done = arguments[arguments.length - 1];"
            f"Promise.resolve((() => {{ {script} }})()).then(done, (error) => done('failed: ' + error));"
        )
        return self._send("POST", f"{self._session}/execute/async", {"script": wrapped, "args": []})

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + 20
        while not self.run(f"return Boolean({expression});"):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.05)

    def click(self, x: float, y: float) -> None:
        """Press the mouse button at a place in the window."""
        pointer = {
            "type": "pointer",
            "id": "mouse",
            "parameters": {"pointerType": "mouse"},
            "actions": [
                {"type": "pointerMove", "x": round(x), "y": round(y), "duration": 0},
                {"type": "pointerDown", "button": 0},
                {"type": "pointerUp", "button": 0},
            ],
        }
        self._send("POST", f"{self._session}/actions", {"actions": [pointer]})

    def messages(self) -> list[str]:
        """What was written to the console since the last time."""
        entries = self._send("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries]

    def screenshot(self) -> bytes:
        return b64decode(self._send("GET", f"{self._session}/screenshot"))
