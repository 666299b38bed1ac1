"""libzmq's side of scripts/zmq-interop."""
import base64
import hmac
import http.server
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any, Optional, Union

import msgspec
import nacl.public
import zmq
import zmq.utils.monitor
import zmq.utils.z85

OURS = sys.argv[1]
CTX = zmq.Context()
CTX.setsockopt(zmq.LINGER, 0)
ENCODE = msgspec.msgpack.Encoder()
END = struct.pack(">q", -1)
SECRET = base64.urlsafe_b64encode(bytes(range(32))).decode().rstrip("=")  # a fleet's


def structures(shape):
    """vLLM's events, as lists (shape["array_like"]) or as maps."""

    class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True, **shape):
        block_hashes: list[Union[int, bytes]]
        parent_block_hash: Optional[Union[int, bytes]]
        token_ids: list[int]
        block_size: int
        lora_id: Optional[int] = None
        medium: Optional[str] = None
        lora_name: Optional[str] = None
        extra_keys: Optional[list] = None
        group_idx: Optional[int] = None
        kv_cache_spec_kind: Optional[str] = None
        kv_cache_spec_sliding_window: Optional[int] = None
        locality: Optional[str] = None

    class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True, **shape):
        block_hashes: list[Union[int, bytes]]
        medium: Optional[str] = None
        group_idx: Optional[int] = None
        locality: Optional[str] = None

    class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True, **shape):
        pass

    return BlockStored, BlockRemoved, AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: Optional[int] = None


LISTS, MAPS = structures({"array_like": True}), structures({})


class Sglang:
    class Stored(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="BlockStored"):
        block_hashes: list[int]
        parent_block_hash: Optional[int]
        token_ids: list[int]
        block_size: int
        lora_id: Optional[int]
        medium: Optional[str] = None
        metadata: Optional[dict] = None

    class Removed(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="BlockRemoved"):
        block_hashes: list[int]
        medium: Optional[str] = None

    class Cleared(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="AllBlocksCleared"):
        pass


def goldens():
    out = "internal/kvevents/testdata/"

    def save(name, obj):
        with open(out + name + ".hex", "w") as f:
            f.write(ENCODE.encode(obj).hex() + "\n")

    stored, removed, cleared = LISTS
    save("vllm-arrays", Batch(1.5, [
        stored([11, 22], None, [1, 2, 3, 4], 2, None, "GPU", None), stored([33], 22, [5, 70000], 2, 3, "CPU", "ada"),
        removed([11], "GPU"), cleared()], 0))
    save("vllm-arrays-bytes", Batch(1.5, [
        stored([bytes(range(32))], bytes(range(1, 33)), [1, 2], 2, None, "GPU", None, extra_keys=[("salt",)])], 1))
    stored, removed, cleared = MAPS
    save("vllm-maps", Batch(1.5, [
        stored([11, 22], None, [1, 2, 3, 4], 2, None, "GPU", None, group_idx=0, kv_cache_spec_kind="full_attention"),
        stored([99], None, [1, 2], 2, None, "GPU", None, group_idx=1, kv_cache_spec_kind="sliding_window",
               kv_cache_spec_sliding_window=128),
        removed([2**64 - 1], "STORAGE", group_idx=1), cleared()], 7))
    save("sglang-arrays", Batch(2.25, [
        Sglang.Stored([-5], None, [7], 1, None), Sglang.Stored([-6], -5, [8], 1, None, "CPU_PINNED", {"extra_key": "s"}),
        Sglang.Removed([-5], "EXTERNAL"), Sglang.Removed([-6]), Sglang.Cleared()]))
    record_publisher("internal/zmtp/testdata/pub-libzmq.hex")
    record_curve("internal/zmtp/testdata/curve-libzmq.hex")


def record_publisher(path):
    """What libzmq's PUB sends to one subscriber, byte for byte."""
    pub = CTX.socket(zmq.PUB)
    port = pub.bind_to_random_port("tcp://127.0.0.1")
    s = socket.create_connection(("127.0.0.1", port))
    greeting = bytearray(64)
    greeting[0], greeting[9], greeting[10], greeting[11] = 0xFF, 0x7F, 3, 1
    greeting[12:16] = b"NULL"
    s.settimeout(20)
    heard = b""

    def hear(n):
        nonlocal heard
        while len(heard) < n:
            more = s.recv(4096)
            assert more, "libzmq hung up"
            heard += more

    s.sendall(bytes(greeting))
    hear(64)
    s.sendall(b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB")
    hear(64 + 27)
    s.sendall(b"\x00\x01\x01")
    time.sleep(0.5)  # libzmq has no way to tell that the subscription is in force
    pub.send_multipart([b"kv-events", struct.pack(">q", 7), bytes(i % 256 for i in range(300))])
    hear(421)
    with open(path, "w") as f:
        f.write(heard.hex() + "\n")


def events_key(secret, audience):
    """A private key for KV events, as a picker derives it: HKDF-SHA256 (RFC 5869)."""
    prk = hmac.digest(bytes(32), base64.urlsafe_b64decode(secret + "="), "sha256")
    return hmac.digest(prk, b"xpyd events\0" + audience + b"\1", "sha256")


def key_pair(private):
    return zmq.utils.z85.encode(private), zmq.utils.z85.encode(public(private))


def as_client(sock, secret):
    """Makes a socket show the secret's keys; none for ""."""
    if secret:
        sock.curve_secretkey, sock.curve_publickey = key_pair(events_key(secret, b"subscriber"))
        sock.curve_serverkey = key_pair(events_key(secret, b"publisher"))[1]
    return sock


def as_server(sock, secret):
    if secret:
        sock.curve_server = True
        sock.curve_secretkey, sock.curve_publickey = key_pair(events_key(secret, b"publisher"))
    return sock


def box(ours, theirs):
    return nacl.public.Box(nacl.public.PrivateKey(ours), nacl.public.PublicKey(theirs))


def public(private):
    return bytes(nacl.public.PrivateKey(private).public_key)


def number(n):
    return struct.pack(">Q", n)


def record_curve(path):
    """What libzmq says in CURVE, as server and as client, one command a line. The
    long-term keys are 32 bytes of 1 (server) and 2 (client), the short ones of its
    peer 32 of 3 (as client) and 4 (as server), the cookie that it is given bytes 0
    to 95."""
    s, c, short_c, short_s = (bytes([n]) * 32 for n in (1, 2, 3, 4))
    meta = lambda kind: b"\x0bSocket-Type\0\0\0\x03" + kind
    lines = {}

    def talk(sock, server):
        sock.settimeout(20)
        f = sock.makefile("rb")
        greeting = bytearray(64)
        greeting[0], greeting[9], greeting[10], greeting[11], greeting[32] = 0xFF, 0x7F, 3, 1, server
        greeting[12:17] = b"CURVE"
        sock.sendall(greeting)
        lines[f"{'client' if server else 'server'}.greeting"] = f.read(64)

        def hear():
            flags, size = f.read(1)[0], f.read(1)
            size = struct.unpack(">Q", size + f.read(7))[0] if flags & 2 else size[0]
            return flags, f.read(size)

        def say(flags, body):
            sock.sendall(bytes([flags | 2]) + number(len(body)) + body if len(body) > 255 else bytes([flags, len(body)]) + body)

        return hear, say

    pub = CTX.socket(zmq.PUB)
    pub.curve_server, pub.curve_secretkey, pub.curve_publickey = True, zmq.utils.z85.encode(s), zmq.utils.z85.encode(public(s))
    sock = socket.create_connection(("127.0.0.1", pub.bind_to_random_port("tcp://127.0.0.1")))
    hear, say = talk(sock, False)
    long_key = box(short_c, public(s))
    say(4, b"\x05HELLO\1\0" + bytes(72) + public(short_c) + number(1) + long_key.encrypt(bytes(64), b"CurveZMQHELLO---" + number(1)).ciphertext)
    _, welcome = hear()
    lines["server.welcome"] = welcome
    plain = long_key.decrypt(welcome[24:], b"WELCOME-" + welcome[8:24])
    key = box(short_c, plain[:32])
    vouch = bytes(16) + box(c, plain[:32]).encrypt(public(short_c) + public(s), b"VOUCH---" + bytes(16)).ciphertext
    say(4, b"\x08INITIATE" + plain[32:] + number(2) + key.encrypt(public(c) + vouch + meta(b"SUB"), b"CurveZMQINITIATE" + number(2)).ciphertext)
    lines["server.ready"] = hear()[1]
    say(0, b"\x07MESSAGE" + number(3) + key.encrypt(b"\0\x01kv", b"CurveZMQMESSAGEC" + number(3)).ciphertext)
    time.sleep(0.5)  # libzmq has no way to tell that the subscription is in force
    pub.send_multipart([b"kv-events", number(7), bytes(i % 256 for i in range(300))])
    for n in range(3):
        flags, lines[f"server.message{n}"] = hear()
        assert flags & ~2 == 0, flags
    sock.close()
    pub.close(0)

    ln = socket.create_server(("127.0.0.1", 0))
    sub = CTX.socket(zmq.SUB)
    sub.curve_secretkey, sub.curve_publickey, sub.curve_serverkey = (zmq.utils.z85.encode(k) for k in (c, public(c), public(s)))
    sub.setsockopt(zmq.SUBSCRIBE, b"kv")
    sub.connect(f"tcp://127.0.0.1:{ln.getsockname()[1]}")
    sock, _ = ln.accept()
    hear, say = talk(sock, True)
    _, hello = hear()
    lines["client.hello"] = hello
    cookie = bytes(range(96))
    say(4, b"\x07WELCOME" + bytes(16) + box(s, hello[80:112]).encrypt(public(short_s) + cookie, b"WELCOME-" + bytes(16)).ciphertext)
    lines["client.initiate"] = hear()[1]
    key = box(short_s, hello[80:112])
    say(4, b"\x05READY" + number(1) + key.encrypt(meta(b"PUB"), b"CurveZMQREADY---" + number(1)).ciphertext)
    flags, lines["client.message0"] = hear()
    assert flags & ~2 == 0, flags
    sock.close()
    sub.close(0)
    ln.close()
    with open(path, "w") as f:
        f.writelines(f"{name} {b.hex()}\n" for name, b in lines.items())


class Ours:
    """Our program, and the lines that it prints."""

    def __init__(self, *args):
        self.proc = subprocess.Popen([OURS, *map(str, args)], stdout=subprocess.PIPE, text=True)

    def line(self):
        text = self.proc.stdout.readline()
        assert text, "our side ended"
        return json.loads(text)

    def close(self):
        self.proc.terminate()
        self.proc.wait()


class Engine:
    """A publisher with a replay socket, as vLLM's ZmqEventPublisher."""

    def __init__(self, with_topic, keep=100, first=0, secret=""):
        self.pub, self.router = as_server(CTX.socket(zmq.PUB), secret), as_server(CTX.socket(zmq.ROUTER), secret)
        self.port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.with_topic, self.keep, self.seq, self.kept = with_topic, keep, first, []
        self.running = True
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def publish(self, events, lose=False):
        payload = ENCODE.encode(Batch(float(self.seq), events, 0))
        if not lose:
            self.pub.send_multipart([b"kv-events", struct.pack(">q", self.seq), payload])
        self.kept = (self.kept + [(self.seq, payload)])[-self.keep:]
        self.seq += 1

    def serve(self):
        while self.running:
            if not self.router.poll(100):
                continue
            client, empty, start = self.router.recv_multipart()
            topic = [b"kv-events"] if self.with_topic else []
            for seq, payload in list(self.kept):
                if seq >= struct.unpack(">q", start)[0]:
                    self.router.send_multipart([client, b"", *topic, struct.pack(">q", seq), payload])
            self.router.send_multipart([client, b"", *([b""] if self.with_topic else []), END, b""])

    def close(self):
        self.running = False
        self.thread.join()
        self.pub.close(0)
        self.router.close(0)


def follows(name, shape, with_topic, secret=""):
    stored, removed, _ = shape
    e = Engine(with_topic, secret=secret)
    e.publish([stored([1, 2], None, [1, 2, 3, 4], 2)])
    ours = Ours("-follow", f"127.0.0.1:{e.port}", "-replay", f"127.0.0.1:{e.replay_port}", "-secret", secret)
    b = ours.line()["batch"]
    assert b["Events"][0]["Hashes"] == [1, 2] and b["Events"][0]["Tokens"] == [1, 2, 3, 4], b
    time.sleep(0.5)  # until the subscription is in force; a loss would be mended, which is the next test
    e.publish([removed([1])])
    assert ours.line()["batch"]["Events"][0] | {"Kind": 1, "Hashes": [1]} == ours_event(1, [1]), name
    e.publish([removed([5])], lose=True)  # mended by replay
    e.publish([removed([6])])
    assert [ours.line()["batch"]["Events"][0]["Hashes"] for _ in range(2)] == [[5], [6]]
    e.kept, e.seq = [], e.seq + 3  # and one that cannot be
    e.publish([removed([7])])
    assert "reset" in ours.line() and ours.line()["batch"]["Events"][0]["Hashes"] == [7]
    ours.close()
    e.close()
    print(f"ok   follows a libzmq publisher: {name}")


def ours_event(kind, hashes):
    return {"Kind": kind, "Hashes": hashes, "Tier": 0, "Group": 0, "Window": False, "Parent": 0, "HasParent": False,
            "Tokens": None, "BlockSize": 0, "LoRA": "", "Extra": None}


def publishes(name, shape, *flags, secret=""):
    ours = Ours("-publish", 20, "-secret", secret, *flags)
    pub, replay = ours.line()["listening"]
    if secret:
        strangers(pub)
    sub = as_client(CTX.socket(zmq.SUB), secret)
    sub.connect(f"tcp://{pub}")
    sub.setsockopt(zmq.SUBSCRIBE, b"kv")
    sub.setsockopt(zmq.HEARTBEAT_IVL, 100)
    decode = msgspec.msgpack.Decoder(type_of(shape))
    assert sub.poll(5000)
    topic, seq, payload = sub.recv_multipart()
    n = struct.unpack(">q", seq)[0]
    batch = decode.decode(payload)
    stored, removed, cleared = batch.events
    assert topic == b"kv-events" and batch.ts == n, (topic, batch)
    assert stored.block_hashes == [n, 2**63 + n] and stored.token_ids == [1, 2, 3, 70000 + n] and stored.block_size == 2, stored
    assert removed.block_hashes == [n] and removed.medium == "CPU", removed
    d = as_client(CTX.socket(zmq.DEALER), secret)
    d.connect(f"tcp://{replay}")
    d.send_multipart([b"", struct.pack(">q", 0)])
    got = []
    while True:
        assert d.poll(5000)
        empty, topic, seq, payload = d.recv_multipart()
        if seq == END:
            break
        got.append(struct.unpack(">q", seq)[0])
        decode.decode(payload)
    assert got[: n + 1] == list(range(n + 1)), got
    req = as_client(CTX.socket(zmq.REQ), secret)  # as vLLM's example subscriber
    req.connect(f"tcp://{replay}")
    req.send(struct.pack(">q", 0))
    assert req.poll(5000) and len(req.recv_multipart()) == 3
    for s in (sub, d, req):
        s.close(0)
    ours.close()
    print(f"ok   publishes to libzmq: {name}")


def strangers(pub):
    """Nobody without the secret hears anything, and libzmq knows why."""
    for secret, event in ("", zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), (SECRET[::-1], zmq.EVENT_HANDSHAKE_FAILED_AUTH):
        sub = as_client(CTX.socket(zmq.SUB), secret)
        monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(f"tcp://{pub}")
        assert monitor.poll(5000)
        got = zmq.utils.monitor.recv_monitor_message(monitor)
        assert got["event"] == event and (event != zmq.EVENT_HANDSHAKE_FAILED_AUTH or got["value"] == 400), got
        assert not sub.poll(200)
        sub.disable_monitor()
        sub.close(0)


def type_of(shape):
    class Typed(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
        ts: float
        events: list[Union[shape]]
        data_parallel_rank: Optional[int] = None

    return Typed


def registers():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = {"/v1/models": b'{"data":[{"id":"m"}]}', "/version": b'{"version":"0.9.1"}'}.get(self.path)
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *args):
            pass

    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    ours = Ours("-register")
    at = f"127.0.0.1:{web.server_port}"
    s = CTX.socket(zmq.DEALER)
    s.setsockopt_string(zmq.IDENTITY, "127.0.0.1:14579")
    s.connect(f"tcp://{ours.line()['listening']}")
    s.send(ENCODE.encode({"type": "P", "http_address": at, "zmq_address": "127.0.0.1:14579"}))
    inst = ours.line()["added"]
    assert inst["url"] == "http://" + at and inst["role"] == "prefill" and inst["version"] == "0.9.1" and inst["bootstrap"] == "127.0.0.1:14579", inst
    s.close(0)
    ours.close()
    web.shutdown()
    print("ok   takes registrations of a libzmq DEALER")


if "--goldens" in sys.argv:
    goldens()
    print("ok   goldens written")
print("libzmq", zmq.zmq_version(), "pyzmq", zmq.__version__)
follows("vLLM, lists, topic in the replay", LISTS, True)
follows("vLLM, maps, topic in the replay", MAPS, True)
follows("SGLang's replay without a topic", LISTS, False)
follows("CURVE", MAPS, True, SECRET)
publishes("maps", MAPS)
publishes("lists", LISTS, "-arrays")
publishes("CURVE", MAPS, secret=SECRET)
registers()
CTX.destroy(0)
