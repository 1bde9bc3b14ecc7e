"""A headless Chromium, driven through its debugging pipe: no driver, no port, no packages."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Message = dict[str, Any]

FLAGS = (
    "--headless",
    "--no-sandbox",  # needed where tests run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",  # a container's is small
)


def executable() -> str | None:
    """A Chromium that starts; some systems install a stand-in that only says where to get one."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path and _starts(path)), None)


def _starts(program: str) -> bool:
    return subprocess.run([program, "--version"], capture_output=True, check=False, timeout=30).returncode == 0


class Pipe:
    """Messages to and from the browser: JSON, each ended by a zero byte."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer = b""

    def send(self, message: Message) -> None:
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]

    def receive(self, deadline: float) -> Message:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium does not answer")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise EOFError("Chromium has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: Message = json.loads(line)
        return message


class Tab:
    """One page. Everything that it logs or asks the network for is kept."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._number = 0
        self._session: str | None = None
        self.events: list[Message] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Message:
        """Call a method of the DevTools protocol."""
        self._number += 1
        number = self._number
        message: Message = {"id": number, "method": method, "params": params}
        self._pipe.send(message | ({"sessionId": self._session} if self._session else {}))
        deadline = time.monotonic() + 30
        while (answer := self._pipe.receive(deadline)).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: Message = answer["result"]
        return result

    def open(self, path: Path) -> None:
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + 30
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._pipe.receive(deadline))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=width < 600
        )

    def emulate(self, scheme: str = "light", media: str = "") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def problems(self) -> list[Message]:
        """What the page complained about: exceptions, errors and warnings in the console."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [request["request"]["url"] for request in sent]

    def screenshot(self) -> bytes:
        """The whole page, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def pdf(self) -> bytes:
        """The page as it prints on A4."""
        size = {"paperWidth": 8.27, "paperHeight": 11.69, "preferCSSPageSize": True, "printBackground": True}
        return base64.b64decode(self.call("Page.printToPDF", **size)["data"])


#: The browser reads commands from descriptor 3 and answers on 4. Neither may be overwritten before it is copied.
LAUNCHER = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for target, end in zip((3, 4), ends):
    os.dup2(end, target)
os.execv(sys.argv[3], sys.argv[3:])
"""


@contextmanager
def browser(program: str) -> Iterator[Tab]:
    """Start Chromium with a fresh profile and open one tab."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        flags = (*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank")
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(to_read), str(from_write), program, *flags],
            pass_fds=(to_read, from_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(from_write)
        try:
            yield Tab(Pipe(to_write, from_read))
        finally:
            os.close(to_write)  # it ends when nobody can talk to it any more
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(from_read)
