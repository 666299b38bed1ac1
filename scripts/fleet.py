"""A router and workers of xpyd as processes, for scripts that measure or break
them (bench-goodput, push-test, push-faults), and models of random weights for
them. Python's standard library only, but for those models: it also runs where
nothing can be installed."""
import ctypes, http.client, json, os, random, shutil, signal, subprocess, tempfile, time, urllib.request

SERVED = "model"  # what clients call it


def call(url, body=None, token="", timeout=60):
    """The JSON answer of a GET, or of a POST of body."""
    req = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"})
    if token:
        req.add_header("Authorization", "Bearer " + token)
    with urllib.request.urlopen(req, timeout=timeout) as r:
        return json.loads(r.read() or b"{}")


def until(limit, f):
    """Waits until f is true; returns how long that took, None when it did not."""
    start = time.monotonic()
    while time.monotonic() - start < limit:
        try:
            if f():
                return time.monotonic() - start
        except (OSError, ValueError, KeyError, http.client.HTTPException):
            pass
        time.sleep(0.02)
    return None


def prompt(n, seed, low=3, high=500):
    """So many token ids, the first of them the beginning of a text."""
    rnd = random.Random(seed)
    return [1] + [rnd.randrange(low, high) for _ in range(n - 1)]


libc = ctypes.CDLL(None)


def die_with_us():
    """In a child: it is killed when the thread that started it ends, so that nothing
    is left of a script that was killed. Start processes from the main thread."""
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.setpgid(0, 0)  # a Ctrl-C is the script's


VOCAB = 512


def make_model(into, tokenizer, shape="small"):
    """A Llama of random bf16 weights with VOCAB tokens to draw from and 8 KV heads of 128: 4 KiB of KV a token
    and layer. small: 8 layers of 2048; 8b: Llama-3-8B's. Needs PyTorch; tokenizer is a folder that has one."""
    import torch
    from safetensors.torch import save_file
    os.makedirs(into, exist_ok=True)
    for f in os.listdir(tokenizer):
        if f.startswith("tokenizer"):
            shutil.copy(os.path.join(tokenizer, f), into)
    layers, hidden, ff, heads, kv, dim = (32, 4096, 14336, 32, 8, 128) if shape == "8b" else (8, 2048, 5632, 16, 8, 128)
    torch.manual_seed(1)
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    mat = lambda *s: (torch.randn(*s, device=dev) * (s[-1] ** -0.5)).to(torch.bfloat16).cpu()
    one = torch.ones(hidden, dtype=torch.bfloat16)
    t = {"model.embed_tokens.weight": (torch.randn(VOCAB, hidden) * 0.5).to(torch.bfloat16), "model.norm.weight": one.clone(), "lm_head.weight": mat(VOCAB, hidden)}
    for i in range(layers):
        p = f"model.layers.{i}."
        t |= {p + "input_layernorm.weight": one.clone(), p + "post_attention_layernorm.weight": one.clone(),
              p + "self_attn.q_proj.weight": mat(heads * dim, hidden), p + "self_attn.k_proj.weight": mat(kv * dim, hidden),
              p + "self_attn.v_proj.weight": mat(kv * dim, hidden), p + "self_attn.o_proj.weight": mat(hidden, heads * dim),
              p + "mlp.gate_proj.weight": mat(ff, hidden), p + "mlp.up_proj.weight": mat(ff, hidden), p + "mlp.down_proj.weight": mat(hidden, ff)}
    save_file(t, os.path.join(into, "model.safetensors"))
    with open(os.path.join(into, "config.json"), "w") as f:
        json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": ff,
                   "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": dim, "max_position_embeddings": 32768,
                   "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
                   "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}, f)


def result(name, unit, value, runs, spread, peer="", peer_value=0.0):
    """Prints a figure as scripts/cuda-test reads it."""
    print("RESULT " + json.dumps({"name": name, "unit": unit, "value": value, "runs": runs, "spread": spread, "peer": peer, "peer_value": peer_value}), flush=True)


class Fleet:
    """Processes of one fleet; stop() ends them all. Where one runs is a GPU's number,
    or None for the CPU."""

    def __init__(self, xpyd, library="", model="", port=18000, keep_logs=None):
        self.xpyd, self.library, self.model, self.port = os.path.abspath(xpyd), library and os.path.abspath(library), model, port
        self.work = tempfile.mkdtemp(prefix="xpyd-fleet-")
        self.data, self.keep_logs = os.path.join(self.work, "data"), keep_logs
        self.public, self.admin = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
        self.processes = {}

    def start(self, name, argv, **env):
        env = {k: v for k, v in os.environ.items() if not k.startswith("XPYD_") or k.startswith("XPYD_CUDA_")} | env
        if self.library:
            env["XPYD_CUDA_LIB"] = self.library
        with open(os.path.join(self.work, name + ".log"), "ab") as log:
            self.processes[name] = subprocess.Popen([self.xpyd, *argv], stdout=log, stderr=log, env=env, preexec_fn=die_with_us)
        return self.processes[name]

    def router(self, engines=(), limit=30):
        """engines: (id, url) of whole workers that the router sends whole requests to."""
        argv = ["router", "--listen", f"127.0.0.1:{self.port}", "--admin", f"127.0.0.1:{self.port + 1}", "--data", self.data]
        if engines:
            path = os.path.join(self.work, "router.yaml")
            with open(path, "w") as f:
                f.write("static:\n" + "".join(f'  - {{id: {i}, role: decode, url: "{u}", dialect: openai, model: {SERVED}}}\n' for i, u in engines))
            argv += ["--config", path]
        self.start("router", argv)
        if until(limit, lambda: os.path.exists(os.path.join(self.data, "join-url"))) is None:
            raise RuntimeError("the router has not started: " + self.tail("router"))
        self.token = open(os.path.join(self.data, "admin-token")).read().strip()

    def worker(self, role, name, gpu=None, join=True, listen="", flags=(), **env):
        argv = [role, "--id", name, "--served-name", SERVED, "--device", "cpu" if gpu is None else "cuda", *flags]
        if join:
            argv += ["--join", open(os.path.join(self.data, "join-url")).read().strip()]
        if listen:
            argv += ["--listen", listen]
        if self.model:
            argv += ["--model", self.model]
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = str(gpu)
        return self.start(name, argv, **env)

    def members(self):
        return call(self.admin + "/admin/v1/instances", token=self.token).get("instances", [])

    def member(self, name):
        return next((m for m in self.members() if m.get("id") == name), {})

    def order(self, name, verb):
        return call(f"{self.admin}/admin/v1/instances/{name}/{verb}", {}, self.token)

    def ready(self, names, limit):
        """Waits until all of these take requests; returns seconds, or raises."""
        def there():
            for n in names:
                if self.processes[n].poll() is not None:
                    raise RuntimeError(f"{n} has ended: {self.tail(n)}")
            live = {m["id"] for m in self.members() if m.get("state") == "live" and m.get("probed")}
            return set(names) <= live and call(self.public + "/ready") is not None
        took = until(limit, there)
        if took is None:
            raise RuntimeError(f"not ready within {limit} s: {self.members()}; " + self.tail(names[-1]))
        return took

    def tail(self, name, lines=8):
        """The end of a log, and of one that ends in a crash how that begins."""
        path = os.path.join(self.work, name + ".log")
        if not os.path.exists(path):
            return "no log"
        all = open(path, errors="replace").readlines()
        crash = next((i for i, l in enumerate(all) if l.startswith(("fatal error: ", "SIG", "panic: ", "unexpected fault "))), len(all))
        return "".join(all[max(crash - 4, 0):crash + 60] + all[max(crash + 60, len(all) - lines):] if crash < len(all) else all[-lines:])

    def stop(self, limit=20):
        for p in reversed(self.processes.values()):
            if p.poll() is None:
                p.send_signal(signal.SIGCONT)
                p.terminate()
        end = time.monotonic() + limit
        for p in self.processes.values():
            try:
                p.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()
        if self.keep_logs:
            os.makedirs(self.keep_logs, exist_ok=True)
            for f in os.listdir(self.work):
                if f.endswith(".log"):
                    shutil.copy(os.path.join(self.work, f), self.keep_logs)
        shutil.rmtree(self.work, ignore_errors=True)
