"""The official Python library, unmodified, against a router in front of mock
engines of every dialect.

Run by scripts/clients, which starts them: the model's name is the dialect's, and
dialects.json says what becomes of requests that not every engine can split. A
mock takes 20 ms to its first token and 2 ms for each other one.
"""
import asyncio
import concurrent.futures
import json
import os
import pathlib
import sys
import time
import traceback

import openai

URL = os.environ["XPYD_URL"]
DIALECTS = json.loads(pathlib.Path(__file__).with_name("dialects.json").read_text())
PROMPT = "Once upon a time"

# What scripts/clients shows against `xpyd up` only.
EMBEDDER = "embeddings"  # an engine that embeds and does not generate
NOT_HERE = """not against mocks, whose text depends on the prompt alone and who check no values:
  stop, logprobs and echoed text, seed, temperature, parameters out of range, prompts that are too long"""


def equal(got, want):
    assert got == want, f"{got!r}, want {want!r}"


class Check:
    """The checks of one dialect; each returns what to show of it."""

    def __init__(self, dialect):
        self.model, self.want = dialect, DIALECTS[dialect]
        self.c = openai.OpenAI(base_url=URL + "/v1", api_key="unused", max_retries=0, timeout=30)

    def ready(self):
        """Each pair is probed before it gets requests."""
        for left in range(300, -1, -1):
            try:
                return self.complete() and None
            except (openai.InternalServerError, openai.NotFoundError):
                if not left:
                    raise
                time.sleep(0.1)

    def complete(self, **kw):
        return self.c.completions.create(**{"model": self.model, "prompt": PROMPT, "max_tokens": 8, **kw})

    def plain(self):
        r = self.complete(max_tokens=12)
        equal((r.object, r.model, r.choices[0].finish_reason), ("text_completion", self.model, "length"))
        equal(len(r.choices[0].text.split()), 12)
        equal((r.usage.prompt_tokens, r.usage.completion_tokens, r.usage.total_tokens), (9, 12, 21))
        equal(self.complete(max_tokens=12).choices[0].text, r.choices[0].text)

    def stream(self):
        parts, usage = [], None
        for chunk in self.complete(stream=True, stream_options={"include_usage": True}):
            parts += [c.text for c in chunk.choices]
            usage = chunk.usage or usage
        equal("".join(parts), self.complete().choices[0].text)
        assert len(parts) >= 8, f"{len(parts)} chunks"
        equal((usage.prompt_tokens, usage.completion_tokens), (9, 8))

    def chat(self):
        body = {"model": self.model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
        r = self.c.chat.completions.create(**body)
        equal(r.choices[0].message.role, "assistant")
        parts = [c.choices[0].delta.content or "" for c in self.c.chat.completions.create(**body, stream=True)]
        equal("".join(parts), r.choices[0].message.content)
        kinds = set()
        try:
            with self.c.chat.completions.stream(**body) as s:
                for event in s:
                    kinds.add(event.type)
                s.get_final_completion()
            raise AssertionError("the helper takes a cut answer for a whole one")
        except openai.LengthFinishReasonError as e:
            equal(e.completion.choices[0].message.content, r.choices[0].message.content)
        assert {"chunk", "content.delta"} <= kinds, kinds

    def headers(self):
        r = self.c.completions.with_raw_response.create(model=self.model, prompt=PROMPT, max_tokens=1, extra_headers={"x-request-id": "py-1"})
        equal(r.headers["x-request-id"], "py-1")
        equal(r.headers.get("x-xpyd-prefill") is not None, self.want["split"])
        assert r.headers["x-xpyd-decode"] and "ttft" in r.headers["server-timing"], r.headers
        equal(r.parse().usage.completion_tokens, 1)

    def shape(self, name, choices, **kw):
        """A request that only some engines can split."""
        want = self.want[name]
        try:
            r = self.c.completions.with_raw_response.create(model=self.model, max_tokens=4, **{"prompt": PROMPT, **kw})
        except openai.BadRequestError as e:
            equal((want, e.param), ("refused", name))
            return want
        equal(r.headers.get("x-xpyd-fallback"), name if want == "decode" else None)
        equal(r.headers.get("x-xpyd-prefill") is not None, want == "split")
        equal([c.index for c in r.parse().choices], list(range(choices)))
        return want

    def n(self):
        return self.shape("n", 3, n=3)

    def batch(self):
        return self.shape("batch", 2, prompt=[PROMPT, "The little dog"])

    def echo(self):
        return self.shape("echo", 1, echo=True)

    def tokens(self):
        equal(self.complete(prompt=[1, 403, 407, 261, 378]).usage.completion_tokens, 8)

    def errors(self):
        def raised(kind, f):
            try:
                f()
            except kind as e:
                return e
            raise AssertionError(f"no {kind.__name__}")
        equal(raised(openai.NotFoundError, lambda: self.complete(model="nope")).body["code"], "model_not_found")
        for stream in (False, True):
            e = raised(openai.BadRequestError, lambda: self.complete(stream=stream, extra_headers={"x-request-id": "py-bad"},
                                                                     extra_body={"kv_transfer_params": {"do_remote_decode": True}}))
            equal((e.status_code, e.type, e.param, e.request_id), (400, "invalid_request_error", "kv_transfer_params", "py-bad"))
        raised(openai.NotFoundError, lambda: self.c.embeddings.create(model=self.model, input="x"))
        raised(openai.APITimeoutError, lambda: self.complete(max_tokens=400, timeout=0.001))

    def deadline(self):
        seen = []
        hooks = {"response": [lambda r: seen.append(r.status_code)]}
        with openai.OpenAI(base_url=URL + "/v1", api_key="x", max_retries=1, timeout=30,
                           http_client=openai.DefaultHttpxClient(event_hooks=hooks)) as c:
            try:
                c.completions.create(model=self.model, prompt=PROMPT, max_tokens=500, extra_headers={"x-request-timeout-ms": "1"})
                raise AssertionError("no error")
            except openai.InternalServerError as e:
                equal((e.status_code, seen), (504, [504, 504]))

    def cancel(self):
        for _ in range(3):
            s = self.complete(max_tokens=400, stream=True)
            next(iter(s))
            s.close()

        async def side_by_side():
            async with openai.AsyncOpenAI(base_url=URL + "/v1", api_key="x", max_retries=0, timeout=60) as c:
                async def read(limit=None):
                    parts = []
                    s = await c.completions.create(model=self.model, prompt=PROMPT, max_tokens=20, stream=True)
                    async for chunk in s:
                        parts.append(chunk.choices[0].text)
                        if len(parts) == limit:
                            await s.close()
                            break
                    return "".join(parts)
                whole = await read()
                got = await asyncio.gather(*[read(3 if i % 2 else None) for i in range(8)])
                for i, text in enumerate(got):
                    assert whole.startswith(text) if i % 2 else text == whole, text
        asyncio.run(side_by_side())

    def models(self):
        assert self.model in [m.id for m in self.c.models.list()]


CHECKS = ["ready", "plain", "stream", "chat", "headers", "n", "batch", "echo", "tokens", "errors", "deadline", "cancel", "models"]


def run(dialect):
    check, line, failed, start = Check(dialect), [], [], time.time()
    for name in CHECKS:
        try:
            line.append(f"{name} {getattr(check, name)() or 'ok'}")
        except Exception:
            line.append(f"{name} FAILED")
            failed.append(f"{dialect}: {name}\n{traceback.format_exc()}")
    check.c.close()
    return f"python  {dialect:<24} {', '.join(line)} ({time.time() - start:.1f} s)", failed


def embedder():
    c = openai.OpenAI(base_url=URL + "/v1", api_key="unused", max_retries=0, timeout=30)
    r = c.embeddings.create(model=EMBEDDER, input=["a", "b"], encoding_format="float")
    equal([(d.index, len(d.embedding)) for d in r.data], [(0, 8), (1, 8)])
    equal(r.usage.prompt_tokens, 18)
    equal(c.embeddings.create(model=EMBEDDER, input="b").data[0].embedding, r.data[1].embedding)
    try:
        c.completions.create(model=EMBEDDER, prompt=PROMPT)
        raise AssertionError("it generates")
    except openai.BadRequestError as e:
        equal(e.param, "model")


if __name__ == "__main__":
    failures = []
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for line, failed in pool.map(run, DIALECTS):
            print(line, flush=True)
            failures += failed
    try:
        embedder()
        print(f"python  {EMBEDDER:<24} embeddings ok, completions refused")
    except Exception:
        failures.append(f"{EMBEDDER}\n{traceback.format_exc()}")
    print(NOT_HERE)
    print("\n".join(failures), file=sys.stderr)
    sys.exit(bool(failures))
