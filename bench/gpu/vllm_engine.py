#!/usr/bin/env python3
"""Runs a vLLM engine for vllm_servers.py. The engine reads a JSON command per line and answers each
with a line of JSON. Before the first command, it writes {"ready": true, …} or {"error": …}.

  {"op": "ask", "prompt": 3}        the time to the first token, and a hash of the tokens
  {"op": "all"}                     the same for all prompts, one after the other
  {"op": "batch"}                   the same for all prompts as one batch
  {"op": "sleep", "level": 1}       puts the engine to sleep with vLLM's sleep mode
  {"op": "wake"}                    wakes it
"""

import argparse
import hashlib
import json
import os
import random
import sys
import time

PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 16, 256, 32
VOCABULARY = 32000
SPECIAL_TOKENS = 2  # the first token numbers, which prompts do not contain
MAX_MODEL_LEN, MAX_BATCHED_TOKENS = 4096, 4096
# Graphs for decoding, without torch.compile, so that a start takes seconds.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}


def prompt(number):
    seeds = [number, *(f"{number}-{i}" for i in range(PROMPT_TOKENS - 1))]
    return [random.Random(seed).randrange(SPECIAL_TOKENS, VOCABULARY) for seed in seeds]


def digest(tokens):
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def median(values):
    return sorted(values)[len(values) // 2]


def options(arguments):
    """Returns the arguments of `LLM`."""
    said = {"model": arguments.model, "load_format": "dummy", "dtype": "bfloat16", "seed": 0}
    said |= {"gpu_memory_utilization": arguments.utilization, "max_model_len": MAX_MODEL_LEN}
    said |= {"max_num_seqs": PROMPTS, "max_num_batched_tokens": MAX_BATCHED_TOKENS}
    # A cached prefix would shorten the time to the first token.
    said |= {"enable_prefix_caching": False, "disable_log_stats": True}
    if arguments.mode == "eager":
        said["enforce_eager"] = True
    if arguments.mode == "graph":
        said["compilation_config"] = GRAPHS
    if arguments.backend:
        said["attention_backend"] = arguments.backend
    if arguments.tensor > 1:
        said["tensor_parallel_size"] = arguments.tensor
    if arguments.sleep_mode:
        said["enable_sleep_mode"] = True
    return said


class Engine:
    def __init__(self, arguments):
        began = time.time()
        from vllm import LLM

        self.import_seconds = round(time.time() - began, 2)
        self.llm = LLM(**options(arguments))
        self.requests = 0

    def answer(self, numbers, tokens=ANSWER_TOKENS):
        """Answers the prompts as one batch. Returns the seconds until the first token of any
        prompt, the seconds until all answers are complete, and the tokens of each answer."""
        from vllm import SamplingParams

        engine, first, answers = self.llm.llm_engine, None, {}
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        for number in numbers:
            self.requests += 1
            engine.add_request(f"{number}-{self.requests}", {"prompt_token_ids": prompt(number)}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.outputs and output.outputs[0].token_ids:
                    first = first or time.perf_counter() - began
                    answers[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)
        return first, time.perf_counter() - began, [answers.get(number, []) for number in numbers]

    def handle(self, command):
        operation, began = command["op"], time.perf_counter()
        if operation == "ask":
            first, whole, answers = self.answer([command["prompt"]])
            return {"first": first, "whole": whole, "hash": digest(answers[0])}
        if operation == "all":
            firsts, wholes, answers = zip(*[self.answer([number]) for number in range(PROMPTS)])
            hashes = [digest(tokens) for [tokens] in answers]
            said = {"hashes": hashes, "distinct": len(set(hashes)), "sample": answers[0][0][:8]}
            return said | {"first": median(firsts), "whole": median(wholes)}
        if operation == "batch":
            _, whole, answers = self.answer(range(PROMPTS))
            return {"hashes": [digest(tokens) for tokens in answers], "whole": whole}
        if operation == "sleep":
            self.llm.sleep(level=command.get("level", 1))
        elif operation == "wake":
            self.llm.wake_up()
        else:
            raise ValueError(f"unknown operation {operation}")
        return {"seconds": time.perf_counter() - began}


def error(e):
    return {"error": type(e).__name__, "message": str(e)[:600]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of the model")
    parser.add_argument("--utilization", type=float, required=True, help="vLLM's gpu-memory-utilization")
    parser.add_argument("--mode", choices=["eager", "graph", "default"], default="graph")
    parser.add_argument("--backend", default="", help="vLLM's attention backend (default: vLLM's choice)")
    parser.add_argument("--tensor", type=int, default=1, help="number of GPUs (tensor parallelism)")
    parser.add_argument("--sleep-mode", action="store_true", help="enable vLLM's sleep mode")
    arguments = parser.parse_args()
    # Output of libraries goes to standard error. Only the protocol uses standard output.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(what):
        print(json.dumps(what), file=out, flush=True)

    try:
        began = time.time()
        engine = Engine(arguments)
        first, _, _ = engine.answer([0], tokens=4)
        blocks = engine.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        ready = {"ready": True, "seconds": round(time.time() - began, 2), "import": engine.import_seconds}
        say(ready | {"first": first, "blocks": blocks})
    except BaseException as e:
        say(error(e))
        raise
    for line in sys.stdin:
        try:
            say(engine.handle(json.loads(line)))
        except Exception as e:
            say(error(e))


if __name__ == "__main__":
    main()
