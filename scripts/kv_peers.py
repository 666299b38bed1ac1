#!/usr/bin/env python3
"""Peers of `xpyd bench kv`: what NIXL (UCX) and Mooncake's Transfer Engine do
with the same job, and libc's memcpy. Prints one JSON object a run.

    scripts/kv_peers.py nixl --ucx-tls tcp
    scripts/kv_peers.py nixl --ucx-tls posix,sysv,cma,self
    scripts/kv_peers.py mooncake
    scripts/kv_peers.py memcpy

Two processes on this host. The target owns SIZE bytes in blocks of BLOCK and
registers them; the initiator owns as much, filled with a fixed pattern, and
WRITEs every block to a block of the target elsewhere (both orders shuffled, so
that no library can merge neighbours), in one batch through the library's own
descriptor lists. Then it does the same with SMALL bytes, one transfer at a
time, for latency.

What is timed, on the initiator: from the call that posts a batch to the poll
that sees all of it complete. Before the clock starts: processes, registration,
connection, descriptor lists (NIXL: prepared and bound to a request handle that
is posted again; Mooncake has no prepared form, its lists of integers are made
beforehand and converted inside the call), and warm-up transfers of the same
size. Not timed, because these libraries do not do it: digests, and the
target's knowledge that the data has come. At the end the target compares all
of its memory with the pattern, byte for byte.

With NIXL there is a second latency, "exchange": the target, which is where the
clock is then, notifies the initiator, which posts the same SMALL transfer with
a notification, until the target has seen that. It is what a decode worker that
asks a prefill worker for blocks does, and what xpyd's own latency is of.
"""
import argparse
import base64
import ctypes
import json
import mmap
import os
import resource
import subprocess
import sys
import time

import numpy as np


def memory(size):
    """Zeroed private memory in huge pages where there are any, resident."""
    m = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    m.madvise(mmap.MADV_HUGEPAGE)
    a = np.frombuffer(m, dtype=np.uint8)
    a[:] = 0
    return a


def pattern(size):
    return np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8)


def orders(blocks):
    """Where each block is read and where it goes: two permutations."""
    r = np.random.default_rng(11)
    return r.permutation(blocks), r.permutation(blocks)


def cpu_seconds():
    u = resource.getrusage(resource.RUSAGE_SELF)
    return u.ru_utime + u.ru_stime


class Nixl:
    """One agent. threads: 1 gives it a progress thread of its own; with 0 its
    caller's polling makes progress, which is faster when cores are few."""

    def __init__(self, a, name):
        os.environ["UCX_TLS"] = a.ucx_tls
        os.environ.setdefault("NIXL_LOG_LEVEL", "error")
        os.environ.setdefault("UCX_LOG_LEVEL", "error")
        from nixl_cu12._api import nixl_agent, nixl_agent_config
        self.name = name
        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=bool(a.threads), backends=[]))
        # UCX's shared memory has no peer failure handling, which NIXL asks for
        # unless told otherwise.
        self.agent.create_backend("UCX", {"ucx_error_handling_mode": a.ucx_errors})
        self.polls = not a.threads

    @staticmethod
    def version():
        from importlib.metadata import version
        return "nixl-cu12 " + version("nixl-cu12")

    def register(self, buf):
        self.buf = buf
        self.reg = self.agent.register_memory([(buf.ctypes.data, buf.nbytes, 0, "")], "DRAM")

    def describe(self):
        return {"md": base64.b64encode(self.agent.get_agent_metadata()).decode(), "addr": self.buf.ctypes.data, "name": self.name}

    def connect(self, peer):
        self.peer = self.agent.add_remote_agent(base64.b64decode(peer["md"]))
        self.agent.make_connection(self.peer)

    def prepare(self, local, remote, block):
        def rows(addr):
            d = np.zeros((len(addr), 3), dtype=np.uint64)
            d[:, 0], d[:, 1] = addr, block
            return d
        index = np.arange(len(local), dtype=np.int32)
        here = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows(local), "DRAM")
        there = self.agent.prep_xfer_dlist(self.peer, rows(remote), "DRAM")
        handle = self.agent.make_prepped_xfer("WRITE", here, index, there, index)
        post, check = self.agent.transfer, self.agent.check_xfer_state

        def run():
            state = post(handle)
            while state == "PROC":
                state = check(handle)
            if state != "DONE":
                sys.exit("nixl: transfer state " + state)
        return run, (here, there, handle)

    def progress(self):
        self.agent.get_new_notifs()

    def seen(self, peer, word):
        """Polls until peer has notified us of word."""
        poll, until = self.agent.get_new_notifs, time.perf_counter() + 20
        while True:
            got = poll()
            if not got and time.perf_counter() > until:
                sys.exit("nixl: no notification for 20 s")
            if got:
                if got.get(peer) != [word]:
                    sys.exit("nixl: notified of %r" % got)
                return

    def serve(self, peer, handle, n):
        """The initiator's end of n exchanges."""
        for _ in range(n):
            self.seen(peer, b"want")
            state = self.agent.transfer(handle, b"done")
            while state == "PROC":
                state = self.agent.check_xfer_state(handle)
            if state != "DONE":
                sys.exit("nixl: transfer state " + state)

    def exchange(self, peer, warmup, n):
        """The target's end: seconds of each."""
        self.agent.add_remote_agent(base64.b64decode(peer["md"]))
        peer = peer["name"]
        seconds = np.zeros(n)
        for i in range(-warmup, n):
            t = time.perf_counter()
            self.agent.send_notif(peer, b"want")
            self.seen(peer, b"done")
            if i >= 0:
                seconds[i] = time.perf_counter() - t
        return seconds


class Mooncake:
    def __init__(self, a, name):
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ.setdefault("GLOG_minloglevel", "2")
        # Its queue of 1024 refuses a batch of 16384 blocks.
        for name in ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER"]:
            os.environ.setdefault(name, "65535")
        os.environ.setdefault("MC_TCP_ADMISSION_TIMEOUT_MS", "60000")
        from mooncake.engine import TransferEngine
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            sys.exit("mooncake: initialize failed")
        self.polls = False

    @staticmethod
    def version():
        from importlib.metadata import version
        return "mooncake-transfer-engine-non-cuda " + version("mooncake-transfer-engine-non-cuda")

    def register(self, buf):
        self.buf = buf
        if self.engine.register_memory(buf.ctypes.data, buf.nbytes) != 0:
            sys.exit("mooncake: register_memory failed")

    def describe(self):
        return {"session": "127.0.0.1:%d" % self.engine.get_rpc_port(), "addr": self.buf.ctypes.data}

    def connect(self, peer):
        self.peer = peer["session"]

    def prepare(self, local, remote, block):
        here, there, sizes = [int(x) for x in local], [int(x) for x in remote], [block] * len(local)
        write, peer = self.engine.batch_transfer_sync_write, self.peer

        def run():
            if write(peer, here, there, sizes) != 0:
                sys.exit("mooncake: transfer failed")
        return run, None

    def progress(self):
        pass


def target(a):
    """Says where its memory is, polls if its library wants that, and answers
    what the initiator asks until that ends."""
    lib = LIBS[a.lib](a, "target")
    buf = memory(a.size)
    lib.register(buf)
    print(json.dumps(lib.describe()), flush=True)
    os.set_blocking(0, not lib.polls)
    while True:
        for _ in range(64 if lib.polls else 0):
            lib.progress()
        try:
            word = os.read(0, 1 << 16)  # one line at a time, each is answered
        except BlockingIOError:
            continue
        if word.startswith(b"exchange "):
            seconds = lib.exchange(json.loads(word[9:]), a.small_warmup, a.small_n)
            print(json.dumps(dict(zip(["p50_us", "p99_us"], np.quantile(seconds, [0.5, 0.99]) * 1e6))), flush=True)
        elif word == b"cpu\n":
            print(json.dumps({"cpu_s": cpu_seconds()}), flush=True)
        elif word == b"check\n":
            src, dst = orders(a.size // a.block)
            want, have = pattern(a.size).reshape(-1, a.block), buf.reshape(-1, a.block)
            print(json.dumps({"equal": bool(np.array_equal(have[dst], want[src]))}), flush=True)
        else:  # the initiator has ended
            sys.stdout.flush()
            os._exit(0)  # some libraries' threads outlive their objects


def initiator(a):
    env = dict(os.environ)
    peer = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def tell(word):
        peer.stdin.write(word + "\n")
        peer.stdin.flush()

    def answer():
        line = peer.stdout.readline()
        if not line:
            sys.exit("target ended with code %s" % peer.wait())
        return json.loads(line)

    def ask(word):
        tell(word)
        return answer()
    try:
        begun = time.perf_counter()
        lib = LIBS[a.lib](a, "initiator")
        buf = memory(a.size)
        buf[:] = pattern(a.size)
        lib.register(buf)
        there = answer()
        connect = time.perf_counter()
        lib.connect(there)
        src, dst = orders(a.size // a.block)
        few = a.small // a.block
        small, keep1 = lib.prepare(buf.ctypes.data + src[:few] * a.block, there["addr"] + dst[:few] * a.block, a.block)
        small()
        connect = time.perf_counter() - connect
        large, keep2 = lib.prepare(buf.ctypes.data + src * a.block, there["addr"] + dst * a.block, a.block)
        for _ in range(a.warmup):
            large()
        setup = time.perf_counter() - begun
        cpu = cpu_seconds() + ask("cpu")["cpu_s"]
        large_s = []
        for _ in range(a.repeat):
            t = time.perf_counter()
            large()
            large_s.append(time.perf_counter() - t)
        cpu = cpu_seconds() + ask("cpu")["cpu_s"] - cpu
        for _ in range(a.small_warmup):
            small()
        small_s = np.zeros(a.small_n)
        for i in range(a.small_n):
            t = time.perf_counter()
            small()
            small_s[i] = time.perf_counter() - t
        both = {}
        if a.lib == "nixl":
            tell("exchange " + json.dumps(lib.describe()))
            lib.serve(there["name"], keep1[2], a.small_warmup + a.small_n)
            both = {"exchange_" + k: v for k, v in answer().items()}
        if not ask("check")["equal"]:
            sys.exit("the target's memory is not what was sent")
        q = np.quantile(small_s, [0.5, 0.9, 0.99, 1]) * 1e6 if a.small_n else [0] * 4
        report(a, lib.version(), large_s, cpu_s_per_gb=cpu / (a.repeat * a.size / 1e9), connect_ms=connect * 1e3, setup_s=setup,
               p50_us=q[0], p90_us=q[1], p99_us=q[2], max_us=q[3], **both)
        peer.stdin.close()
        peer.wait(10)
    finally:
        if peer.poll() is None:
            peer.kill()
            peer.wait()
    sys.stdout.flush()
    os._exit(0)  # as the target does


def report(a, version, seconds, **more):
    gbs = [a.size / s / 1e9 for s in seconds]
    print(json.dumps({"peer": a.lib, "version": version, "ucx_tls": a.ucx_tls if a.lib == "nixl" else "", "threads": a.threads,
                      "size": a.size, "block": a.block, "small": a.small, "gb_s": float(np.median(gbs)), "best_gb_s": max(gbs),
                      "all_gb_s": [round(g, 3) for g in gbs], **{k: round(float(v), 4) for k, v in more.items()}}), flush=True)


def memcpy(a):
    """libc's memmove, one thread: one run, and the scattered blocks."""
    src, dst = memory(a.size), memory(a.size)
    src[:] = pattern(a.size)
    move = ctypes.CDLL(None).memmove
    move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    move.restype = None
    seconds = []
    for i in range(a.warmup + a.repeat):
        t = time.perf_counter()
        move(dst.ctypes.data, src.ctypes.data, a.size)
        if i >= a.warmup:
            seconds.append(time.perf_counter() - t)
    report(a, "libc memmove", seconds)


LIBS = {"nixl": Nixl, "mooncake": Mooncake}


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("lib", choices=[*LIBS, "memcpy"])
    p.add_argument("--ucx-tls", default="tcp")
    p.add_argument("--ucx-errors", default="peer", help="none or peer")
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--size", type=int, default=256 << 20)
    p.add_argument("--block", type=int, default=16 << 10)
    p.add_argument("--small", type=int, default=256 << 10)
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--small-warmup", type=int, default=50)
    p.add_argument("--small-n", type=int, default=300)
    p.add_argument("--target", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.lib == "memcpy":
        memcpy(a)
    elif a.target:
        target(a)
    else:
        initiator(a)


if __name__ == "__main__":
    main()
