"""The cases of hibernate.py with servers: of PyTorch, llama-server, and Jupyter with a kernel."""

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request

import hibernate_host as host
import llama_weights
from hibernate_stage import PROGRAMS, START, Program, Refused, order_restore, port, save, tail

TOKENS = 64
TOKEN = "bench"


def request(url, body=None, limit=30):
    """Returns the answer to an HTTP request. A process that is starting or being restored does not listen yet."""
    until = time.monotonic() + limit
    data = None if body is None else json.dumps(body).encode()
    while True:
        try:
            asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            return json.loads(urllib.request.urlopen(asked, timeout=60).read())
        except OSError as why:
            # llama-server answers 503 while it loads the model.
            is_early = not isinstance(why, urllib.error.HTTPError) or why.code == 503
            if not is_early or time.monotonic() > until:
                raise
            time.sleep(0.05)


def end(program):
    if program.lives():
        os.kill(program.pid, signal.SIGKILL)
    program.until_gone()


def restore_server(stage_, image, row, ask):
    """Restores a server. Returns its first answer."""
    begun = time.monotonic()
    order_restore(stage_, image, row)
    answer = ask()
    row["restore"] = round(time.monotonic() - begun, 3)
    return answer


def server(stage_, row):
    stage_.begin()
    number = port()
    words = [sys.executable, str(stage_.programs / PROGRAMS.name), "serve", str(stage_.options.small), str(number)]
    program = Program(stage_, words)
    program.until_works(1)
    ask = lambda: request(f"http://127.0.0.1:{number}/")
    row["expected"] = ask()
    try:
        image = save(stage_, program, row)
        restore_server(stage_, image, row, ask)
    finally:
        if program.lives():
            row["found"] = ask()
            end(program)
    return row["found"] == row["expected"]


def llama_server(stage_, row):
    """The second request continues the first, so its answer depends on the cache on the GPU."""
    if not stage_.options.llama_server:
        raise SystemExit("it needs --llama-server")
    stage_.begin()
    weights = stage_.directory / "weights.gguf"
    llama_weights.write(weights, stage_.options.small)
    number = port()
    words = llama_weights.server(stage_.options.llama_server, weights, number)

    def start(native):
        program = Program(stage_, words, native=native, CUDA_VISIBLE_DEVICES="0")
        program.wait("llama-server listens", lambda: request(f"http://127.0.0.1:{number}/health", limit=START))
        return program

    def ask(prompt):
        body = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "ignore_eos": True, "return_tokens": True}
        said = request(f"http://127.0.0.1:{number}/completion", body | {"cache_prompt": True})
        return {"tokens": said["tokens"], "cached": said["timings"]["cache_n"]}

    first = list(range(10, 10 + TOKENS))
    program = start(native=True)
    one = ask(first)
    second = first + one["tokens"]
    expected = [one, ask(second)]
    end(program)
    program = start(native=False)
    found = [ask(first)]
    try:
        image = save(stage_, program, row)
        found.append(restore_server(stage_, image, row, lambda: ask(second)))
    except Refused:
        found.append(ask(second))
        row["answers-continue"] = found == expected
        raise
    finally:
        end(program)
    row |= {"expected": expected[1], "found": found[1], "first-is-equal": found[0] == expected[0]}
    return found == expected and expected[1]["cached"] > 0


class Notebook:
    """A Jupyter server with a kernel. `transport`: of the messages between them, `ipc` or `tcp`."""

    def __init__(self, stage_, transport, native=False):
        directory = stage_.directory / "notebook"
        directory.mkdir(exist_ok=True)
        os.chown(directory, host.USER, host.USER)
        number = port()
        self.address = f"127.0.0.1:{number}"
        words = [sys.executable, "-m", "jupyter_server", "--ip=127.0.0.1", f"--port={number}", "--no-browser"]
        words += ["--ServerApp.port_retries=0", f"--ServerApp.root_dir={directory}"]
        words += [f"--IdentityProvider.token={TOKEN}", f"--KernelManager.transport={transport}"]
        # The path of a Unix socket has at most 107 characters. Jupyter's own directory can be too long for a socket.
        places = dict.fromkeys(["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"], str(directory))
        self.program = Program(stage_, words, native=native, **places)
        self.program.wait("Jupyter listens", lambda: self.ask("status"))
        self.kernel = self.ask("kernels", {"name": "python3"})["id"]

    def ask(self, what, body=None):
        return request(f"http://{self.address}/api/{what}?token={TOKEN}", body, START)

    def run(self, code):
        """Runs a cell as a browser does, over a WebSocket that is closed at the end. Returns the cell's output."""
        import websocket

        url = f"ws://{self.address}/api/kernels/{self.kernel}/channels?token={TOKEN}"
        connection = websocket.create_connection(url, timeout=START)
        own = os.urandom(8).hex()
        header = {"msg_id": own, "session": own, "username": "", "msg_type": "execute_request", "version": "5.3"}
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        message = {"channel": "shell", "header": header, "parent_header": {}, "metadata": {}, "content": content}
        connection.send(json.dumps(message | {"buffers": []}))
        text, left = "", {"execute_reply", "idle"}
        while left:
            heard = json.loads(connection.recv())
            if heard["parent_header"].get("msg_id") == own:
                said = heard["content"]
                text += said.get("text", "") + "\n".join(said.get("traceback", []))
                left -= {heard["msg_type"], said.get("execution_state")}
        connection.close()
        return text.strip()

    def until_closed(self):
        """Waits until the server has closed the WebSocket of the last cell."""
        is_closed = lambda: self.ask(f"kernels/{self.kernel}")["connections"] == 0
        self.program.wait("the browser's connection is closed", is_closed)

    def prepare(self, stage_):
        """Puts a model on the GPU, and sets a variable. Returns the model's output."""
        self.run(f"import sys\nsys.path.insert(0, {str(stage_.programs)!r})\nfrom hibernate_programs import model")
        return self.run(f"run = model({stage_.options.small})\nfirst = run()\nprint(first)")

    def compare(self):
        """Returns the model's output, and the output before the program was saved."""
        return self.run("print(run(), first)")


def save_notebook(stage_, row, transport, options):
    """Saves and restores a server with its kernel. Returns the outputs of the cells before and after."""
    notebook = Notebook(stage_, transport)
    program = notebook.program
    outputs = [notebook.prepare(stage_)]
    kernels = [client["pid"] for client in stage_.clients()]
    row["processes"] = {"server": program.pid, "kernels": kernels}
    notebook.until_closed()
    try:
        image = save(stage_, program, row, *options)
        outputs.append(restore_server(stage_, image, row, notebook.compare))
        row["said"] = "saved and restored"
        stage_.control("hibernated", "--delete", image)
    except Refused as why:
        row["said"] = str(why)
        outputs.append(notebook.compare())
    finally:
        row["log"] = tail(program.log)
        host.end_all()
        program.until_gone()
    return outputs


def jupyter(stage_, row):
    stage_.begin()
    notebook = Notebook(stage_, "ipc", native=True)
    expected = [notebook.prepare(stage_), notebook.compare()]
    host.end_all()
    row |= {"expected": expected, "found": {}, "tries": {}}
    variants = {"ipc": ("ipc", []), "tcp": ("tcp", []), "tcp-closed": ("tcp", ["--close-connections"])}
    for what, (transport, options) in variants.items():
        part = row[what] = {}
        row["found"][what] = save_notebook(stage_, part, transport, options)
        row["tries"][what] = part["said"]
    row["is-saved"] = any(said == "saved and restored" for said in row["tries"].values())
    return all(found == expected for found in row["found"].values())
