"""A headless Chromium with a page of Cockpit in it, driven over the DevTools protocol on a pipe."""

import base64
import json
import os
import select
import subprocess
import tempfile
import time

# How long a page may take. Only a page that hangs needs all of it.
PATIENCE = 60


class Browser:
    """One browser with one tab. `close` ends it."""

    def __init__(self, url):
        self.url = url
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, commands = os.pipe()
        answers, from_browser = os.pipe()

        def redirect():
            # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
            os.dup2(to_browser, 13)
            os.dup2(from_browser, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)
            os.close(13)
            os.close(14)

        self.log = open(os.path.join(self.profile.name, "log"), "wb")
        self.process = subprocess.Popen(
            ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--hide-scrollbars", "--ignore-certificate-errors", "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}/profile",
             "about:blank"],
            preexec_fn=redirect, close_fds=False, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        os.close(to_browser)
        os.close(from_browser)
        self.commands, self.answers = commands, answers
        self.buffer = b""
        self.number = 0
        self.session = None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.size(1280, 900)

    def close(self):
        try:
            self.session = None
            self.call("Browser.close")
            self.process.wait(10)
        except Exception:
            self.process.kill()
            self.process.wait()
        os.close(self.commands)
        os.close(self.answers)
        self.log.close()
        self.profile.cleanup()

    # ---- the protocol ----

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self.receive(deadline)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.note(answer)

    def receive(self, deadline):
        while b"\0" not in self.buffer:
            if not select.select([self.answers], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            more = os.read(self.answers, 1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self.buffer += more
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def note(self, event):
        """Keeps errors of the page's scripts."""
        if event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            where = details.get("url", "")
            if "/nvshare/" in where or "nvshare" in json.dumps(details):
                self.events.append(details.get("exception", {}).get("description", details["text"]) + f" ({where})")
        elif event.get("method") == "Log.entryAdded":
            entry = event["params"]["entry"]
            if entry["level"] == "error" and "nvshare" in entry.get("url", ""):
                self.events.append(f"{entry['text']} ({entry['url']})")

    # ---- the page ----

    def run(self, script):
        """Evaluates an expression in which `page` is the document of nvshare's page."""
        expression = (
            "(() => { const frame = document.querySelector('iframe[name=\"cockpit1:localhost/nvshare\"]');"
            " const page = frame?.contentDocument ?? document; const view = frame?.contentWindow ?? window;"
            f" return ({script}); }})()")
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails'].get('exception', {}).get('description')}")
        return result["result"].get("value")

    def wait(self, what, script):
        """Waits until an expression is true, and returns its value."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                value = self.run(script)
            except RuntimeError as error:  # the document is being replaced
                value, seen = None, error
            else:
                seen = value
            if value:
                return value
            if time.monotonic() > deadline:
                raise AssertionError(f"waited in vain for {what}: {seen}. The page says: {self.text()!r}")
            time.sleep(0.1)

    def text(self):
        try:
            return self.run("page.body.innerText")
        except RuntimeError as error:
            return str(error)

    def wait_text(self, text, where="body"):
        self.wait(f"{text!r}", f"page.querySelector({json.dumps(where)})?.innerText.includes({json.dumps(text)})")

    def exists(self, selector):
        return self.run(f"!!page.querySelector({json.dumps(selector)})")

    def buttons(self):
        return self.run("[...page.querySelectorAll('button')].map(button => button.textContent)")

    def click(self, selector):
        """Clicks at the middle of an element, as a user does. A button is disabled while it acts."""
        self.wait(selector, f"page.querySelector({json.dumps(selector)})?.disabled !== true && !!page.querySelector({json.dumps(selector)})")
        x, y = self.run(
            f"(() => {{ const one = page.querySelector({json.dumps(selector)}); one.scrollIntoView({{block: 'center'}});"
            " const at = one.getBoundingClientRect(); const outer = frame?.getBoundingClientRect() ?? {left: 0, top: 0};"
            " return [outer.left + at.left + at.width / 2, outer.top + at.top + at.height / 2]; })()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, name, code, text=None):
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, **more)

    def type(self, selector, text):
        """Replaces the text of a field."""
        self.wait(selector, f"!!page.querySelector({json.dumps(selector)})")
        self.run(f"(page.querySelector({json.dumps(selector)}).focus(), page.querySelector({json.dumps(selector)}).select?.(), true)")
        self.call("Input.insertText", text=text)

    def choose(self, selector, value):
        self.run(
            f"(() => {{ const one = page.querySelector({json.dumps(selector)}); one.value = {json.dumps(value)};"
            " one.dispatchEvent(new view.Event('change', {bubbles: true})); return true; })()")

    def size(self, width, height, scale=1):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False)

    def scheme(self, name):
        """Makes the browser prefer the light or the dark colours."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def picture(self, path, whole=False):
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def accessible(self):
        """The nodes of the page's accessibility tree: role, name and whether the node can have the focus."""
        frames = self.call("Page.getFrameTree")["frameTree"].get("childFrames", [])
        ours = [frame["frame"]["id"] for frame in frames if "/nvshare/" in frame["frame"]["url"]]
        self.call("Accessibility.enable")  # not before, because it makes every change of the page slower
        tree = self.call("Accessibility.getFullAXTree", **({"frameId": ours[0]} if ours else {}))["nodes"]
        return [{
            "role": node.get("role", {}).get("value"),
            "name": node.get("name", {}).get("value", ""),
            "focusable": any(one["name"] == "focusable" and one["value"].get("value") for one in node.get("properties", [])),
        } for node in tree if not node.get("ignored")]

    def log_in(self, user, password, administrator=False):
        """Logs in on Cockpit's own page, and opens nvshare's page."""
        self.call("Page.navigate", url=f"{self.url}/nvshare")
        # Before that, the page may still try to log in by other means.
        self.wait("the login page", "document.activeElement?.id === 'login-user-input' && document.readyState === 'complete'")
        self.run(f"(localStorage.setItem('superuser:{user}', '{'any' if administrator else 'none'}'), true)")
        self.type("#login-user-input", user)
        self.type("#login-password-input", password)
        self.click("#login-button")
        self.wait("the page", "!!frame && page.querySelector('#main')?.children.length > 0")
