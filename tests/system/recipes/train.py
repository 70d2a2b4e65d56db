"""A stand-in for a training: train.py [--memory 1G] [--seconds 60]"""

import argparse
import time

from gpu import Gpu, size

parser = argparse.ArgumentParser()
parser.add_argument("--memory", default="1G")
parser.add_argument("--seconds", type=float, default=60)
options = parser.parse_args()

end = time.monotonic() + options.seconds
gpu = Gpu()
gpu.load(size(options.memory))
while time.monotonic() < end:
    gpu.work(100)
