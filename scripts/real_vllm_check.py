"""What scripts/real-vllm checks beside tokens: real_vllm_check.py cancel|events ROUTER P D [ADMIN]

cancel: a client that leaves in the middle of a stream, or before the first
token, ends the request in both engines. events: the KV events of both engines
are in the router's index, and a repeated prompt is known to be warm. The
arguments are URLs. Prints a line a check; exit 1 if one fails.
"""

import http.client
import json
import re
import socket
import sys
import time
import urllib.request
from urllib.parse import urlparse


def metric(url: str, name: str) -> float:
    """Sum of the samples of a metric."""
    with urllib.request.urlopen(url + "/metrics", timeout=10) as r:
        text = r.read().decode()
    return sum(float(v) for v in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M))


def within(limit: float, done) -> float:
    """Seconds until done() holds, -1 if it does not within the limit."""
    start = time.monotonic()
    while not done():
        if time.monotonic() - start > limit:
            return -1
        time.sleep(0.02)
    return time.monotonic() - start


def post(url: str, body: dict) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse | None]:
    u = urlparse(url)
    conn = http.client.HTTPConnection(u.hostname, u.port, timeout=60)
    headers = {"Content-Type": "application/json", "x-xpyd-explain": "1"}
    conn.request("POST", "/v1/completions", json.dumps(body), headers)
    return conn, None


def cancel(router: str, engines: list[str]) -> bool:
    def idle() -> bool:
        return all(metric(e, "vllm:num_requests_running") + metric(e, "vllm:num_requests_waiting") == 0 for e in engines)

    def generated() -> float:
        return sum(metric(e, "vllm:generation_tokens_total") for e in engines)

    ok = True
    for name, prompt, first in (
        ("after three events", "Once upon a time", 3),
        ("before the first token", [3 + i % 900 for i in range(500)], 0),
    ):
        tokens = 500
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        before = generated()
        conn, _ = post(router, body)
        if first:
            resp = conn.getresponse()
            for _ in range(2 * first):
                resp.readline()
        else:
            time.sleep(0.03)
        conn.sock.shutdown(socket.SHUT_RDWR)  # closing alone leaves the response's handle open
        conn.close()
        took = within(30, idle)
        made = generated() - before
        good = took >= 0 and made < tokens
        ok &= good
        print(f"client leaves {name}: engines idle after {took:.2f} s, {made:.0f} of {tokens} tokens made" + ("" if good else ": NOT cancelled"))
    return ok


def events(router: str, engines: list[str], admin: str) -> bool:
    prompt = [3 + (i * 7) % 1000 for i in range(600)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    shown = ""
    for _ in range(2):
        conn, _ = post(router, body)
        resp = conn.getresponse()
        text = resp.read()
        shown = resp.getheader("x-xpyd-explain") or text.decode()
        conn.close()
        if within(10, lambda: metric(admin, "xpyd_router_kv_index_blocks") >= 8) < 0:
            print("KV events: the index stays empty")
            return False
    feeds = metric(admin, "xpyd_router_kv_feeds_connected")
    print(f"KV events: {feeds:.0f} feeds, {metric(admin, 'xpyd_router_kv_index_blocks'):.0f} blocks, "
          f"{metric(admin, 'xpyd_router_kv_index_orphans_total'):.0f} orphans; explained: {shown[:400]}")
    matches = [float(m) for m in re.findall(r'"match"\s*:\s*([0-9.]+)', shown)]
    if feeds < len(engines) or not matches or min(matches) < 0.5:
        print("KV events: a repeated prompt is NOT seen as warm in both engines")
        return False
    return True


def main() -> None:
    what, router, *rest = sys.argv[1:]
    ok = cancel(router, rest[:2]) if what == "cancel" else events(router, rest[:2], rest[2])
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
