"""A real browser without a window, spoken to through a pipe (DevTools protocol): no library is needed for it."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile

from tests.worlds.waiting import until

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
_FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars"


class Browser:
    """One page in a browser of its own."""

    def __init__(self, width=1200, height=1100):
        self._folder = tempfile.mkdtemp(prefix="browser-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]  # above those it is to have
        self._process = subprocess.Popen(
            [CHROMIUM, *_FLAGS.split(), f"--user-data-dir={self._folder}", "--remote-debugging-pipe"],
            pass_fds=(3, 4),
            preexec_fn=lambda: [os.dup2(fd, number) for number, fd in enumerate(ends, 3)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, *ends):
            os.close(fd)
        self._calls, self._rest, self._session = 0, b"", None
        self.errors = []  # what scripts of the page raised
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def _call(self, method, **params):
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(answer["params"]["exceptionDetails"])
            if answer.get("id") == self._calls:
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return answer["result"]

    def _message(self):
        while b"\0" not in self._rest:
            data = os.read(self._in, 1 << 16)
            if not data:
                raise RuntimeError("the browser has ended")
            self._rest += data
        data, _, self._rest = self._rest.partition(b"\0")
        return json.loads(data)

    def go(self, url):
        self._call("Page.navigate", url=url)

    def ask(self, script):
        found = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script, seconds=20):
        """Wait until a script returns something true, and return that."""
        return until(lambda: self.ask(script), seconds)

    def dark(self):
        feature = {"name": "prefers-color-scheme", "value": "dark"}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path):
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        self._session = None
        with contextlib.suppress(Exception):
            self._call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
