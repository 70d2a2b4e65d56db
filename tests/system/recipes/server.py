"""A stand-in for a model server: server.py --port 8001 [--memory 1G]. It answers each request after a short piece of work."""

import argparse
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from gpu import Gpu, size

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--memory", default="1G")
options = parser.parse_args()

gpu = Gpu()
gpu.load(size(options.memory))
one_at_a_time = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        start = time.monotonic()
        with one_at_a_time:
            gpu.enter()
            gpu.work(200)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"answered in {time.monotonic() - start:.2f} s\n".encode())

    def log_message(self, *_):
        pass


ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
