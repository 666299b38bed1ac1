"""The official Python library, unmodified, against a running xpyd.

Run by scripts/clients, which starts xpyd and sets XPYD_URL. The model is
stories260k with a small chat template, so the expected text is the oracle's.
"""
import asyncio
import concurrent.futures
import logging
import os
import time
import unittest

import openai

URL = os.environ["XPYD_URL"]
MODEL = os.environ.get("XPYD_MODEL", "stories260k")
PROMPT = "Once upon a time"
STORY = ", there was a little girl named Lily. She loved to play outside in the park."


def client(**kw):
    return openai.OpenAI(base_url=URL + "/v1", api_key="unused", **{"max_retries": 0, "timeout": 30, **kw})


class Completions(unittest.TestCase):
    def setUp(self):
        self.c = client()

    def test_plain(self):
        r = self.c.completions.create(model=MODEL, prompt=PROMPT, max_tokens=64, temperature=0)
        self.assertTrue(r.choices[0].text.startswith(STORY), r.choices[0].text)
        self.assertEqual(r.choices[0].finish_reason, "length")
        self.assertEqual((r.usage.prompt_tokens, r.usage.completion_tokens, r.usage.total_tokens), (5, 64, 69))
        self.assertEqual(r.object, "text_completion")

    def test_stream_equals_plain(self):
        want = self.c.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0).choices[0].text
        parts, usage = [], None
        for chunk in self.c.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0, stream=True,
                                               stream_options={"include_usage": True}):
            if chunk.choices:
                parts.append(chunk.choices[0].text)
            usage = chunk.usage or usage
        self.assertEqual("".join(parts), want)
        self.assertGreater(len(parts), 10, "a stream arrives in pieces")
        self.assertEqual(usage.completion_tokens, 40)

    def test_n_and_seed(self):
        def draw(seed):
            r = self.c.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, n=3, temperature=1, seed=seed)
            return [c.text for c in sorted(r.choices, key=lambda c: c.index)]
        a, b, other = draw(7), draw(7), draw(8)
        self.assertEqual(a, b)
        self.assertNotEqual(a, other)
        self.assertEqual(len(set(a)), 3)

    def test_stop(self):
        r = self.c.completions.create(model=MODEL, prompt=PROMPT, max_tokens=64, temperature=0, stop=[" Lily", "park"])
        self.assertEqual(r.choices[0].text, ", there was a little girl named")
        self.assertEqual(r.choices[0].finish_reason, "stop")

    def test_logprobs_and_echo(self):
        r = self.c.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0, logprobs=3, echo=True)
        lp = r.choices[0].logprobs
        self.assertTrue(r.choices[0].text.startswith(PROMPT + ","))
        self.assertIsNone(lp.token_logprobs[0])
        self.assertEqual(len(lp.tokens), 9)
        self.assertEqual(len(lp.tokens), len(lp.token_logprobs))
        self.assertTrue(all(x <= 0 for x in lp.token_logprobs[1:]))
        self.assertTrue(all(len(t) >= 3 for t in lp.top_logprobs[1:]))

    def test_batch_and_token_prompts(self):
        r = self.c.completions.create(model=MODEL, prompt=[PROMPT, "The little dog"], max_tokens=8, temperature=0)
        self.assertEqual([c.index for c in r.choices], [0, 1])
        ids = self.c.completions.create(model=MODEL, prompt=[1, 403, 407, 261, 378], max_tokens=8, temperature=0)
        self.assertEqual(ids.choices[0].text, r.choices[0].text)

    def test_embeddings(self):
        texts = [PROMPT, "The end"]
        packed = self.c.embeddings.create(model=MODEL, input=texts)  # the library asks for base64 and unpacks it
        plain = self.c.embeddings.create(model=MODEL, input=texts[1], encoding_format="float")
        self.assertEqual([len(d.embedding) for d in packed.data], [64, 64])
        for a, b in zip(packed.data[1].embedding, plain.data[0].embedding):
            self.assertAlmostEqual(a, b, places=6)
        self.assertAlmostEqual(sum(x * x for x in packed.data[0].embedding), 1, places=4)
        self.assertGreater(packed.usage.total_tokens, plain.usage.prompt_tokens)

    def test_request_id_header(self):
        r = self.c.completions.with_raw_response.create(model=MODEL, prompt=PROMPT, max_tokens=1,
                                                        extra_headers={"x-request-id": "py-1"})
        self.assertEqual(r.headers["x-request-id"], "py-1")
        self.assertTrue(r.headers["x-xpyd-prefill"])
        self.assertTrue(r.headers["x-xpyd-decode"])
        self.assertIn("ttft", r.headers["server-timing"])


class Chat(unittest.TestCase):
    def setUp(self):
        self.c = client()
        self.messages = [{"role": "user", "content": PROMPT}]

    def test_plain_and_stream(self):
        r = self.c.chat.completions.create(model=MODEL, messages=self.messages, max_tokens=24, temperature=0)
        self.assertEqual(r.choices[0].message.role, "assistant")
        parts = []
        for chunk in self.c.chat.completions.create(model=MODEL, messages=self.messages, max_tokens=24, temperature=0, stream=True):
            parts.append(chunk.choices[0].delta.content or "")
        self.assertEqual("".join(parts), r.choices[0].message.content)

    def test_logprobs(self):
        r = self.c.chat.completions.create(model=MODEL, messages=self.messages, max_tokens=3, logprobs=True, top_logprobs=2)
        content = r.choices[0].logprobs.content
        self.assertEqual(len(content), 3)
        self.assertEqual(len(content[0].top_logprobs), 2)
        self.assertEqual(bytes(content[0].bytes).decode("utf-8", "replace"), content[0].token)

    def test_stream_helper(self):
        # The helper raises LengthFinishReasonError for "length", so let it stop.
        with self.c.chat.completions.stream(model=MODEL, messages=self.messages, max_tokens=64, temperature=0, stop=" Lily") as s:
            kinds = {event.type for event in s}
            choice = s.get_final_completion().choices[0]
        self.assertEqual((choice.message.content, choice.finish_reason), (", there was a little girl named", "stop"))
        self.assertLessEqual({"chunk", "content.delta", "content.done"}, kinds)
        with self.assertRaises(openai.LengthFinishReasonError):
            with self.c.chat.completions.stream(model=MODEL, messages=self.messages, max_tokens=4) as s:
                s.get_final_completion()


class Errors(unittest.TestCase):
    def setUp(self):
        self.c = client()

    def test_unknown_model(self):
        with self.assertRaises(openai.NotFoundError) as e:
            self.c.completions.create(model="nope", prompt="x")
        self.assertEqual(e.exception.body["code"], "model_not_found")

    def test_error_has_all_parts(self):
        with self.assertRaises(openai.BadRequestError) as e:
            self.c.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], top_p=2,
                                           extra_headers={"x-request-id": "py-bad"})
        e = e.exception
        self.assertEqual((e.status_code, e.type, e.param, e.request_id), (400, "invalid_request_error", "top_p", "py-bad"))
        self.assertIn("top_p", e.message)

    def test_error_of_a_stream_is_raised_at_once(self):
        with self.assertRaises(openai.BadRequestError):
            self.c.completions.create(model=MODEL, prompt="x " * 2000, stream=True)

    def test_deadline_is_a_server_error_and_is_retried(self):
        # One token a step: 500 of them take longer than a millisecond.
        seen = []
        hooks = {"response": [lambda r: seen.append(r.status_code)]}
        with openai.OpenAI(base_url=URL + "/v1", api_key="x", max_retries=2, timeout=30,
                           http_client=openai.DefaultHttpxClient(event_hooks=hooks)) as c:
            with self.assertRaises(openai.InternalServerError) as e:
                c.completions.create(model=MODEL, prompt=PROMPT, max_tokens=500, extra_body={"ignore_eos": True},
                                     extra_headers={"x-request-timeout-ms": "1"})
        self.assertEqual((e.exception.status_code, seen), (504, [504, 504, 504]))

    def test_unknown_path(self):
        with self.assertRaises(openai.NotFoundError):
            self.c.moderations.create(model=MODEL, input="x")

    def test_bad_value_names_the_field(self):
        with self.assertRaises(openai.BadRequestError) as e:
            self.c.completions.create(model=MODEL, prompt="x", temperature=-1)
        self.assertEqual(e.exception.param, "temperature")

    def test_too_long(self):
        with self.assertRaises(openai.BadRequestError):
            self.c.completions.create(model=MODEL, prompt=[5] * 4000)

    def test_link_fields_are_refused(self):
        with self.assertRaises(openai.BadRequestError) as e:
            self.c.completions.create(model=MODEL, prompt="x", extra_body={"kv_transfer_params": {"do_remote_decode": True}})
        self.assertEqual(e.exception.param, "kv_transfer_params")


class Async(unittest.IsolatedAsyncioTestCase):
    async def test_streams_side_by_side_and_cancelled(self):
        async with openai.AsyncOpenAI(base_url=URL + "/v1", api_key="x", max_retries=0, timeout=60) as c:
            async def read(limit=None):
                parts = []
                s = await c.completions.create(model=MODEL, prompt=PROMPT, max_tokens=100, temperature=0, stream=True)
                async for chunk in s:
                    parts.append(chunk.choices[0].text)
                    if limit and len(parts) == limit:
                        await s.close()
                        break
                return "".join(parts)
            whole = await read()
            self.assertTrue(whole.startswith(STORY))
            got = await asyncio.gather(*[read(3 if i % 2 else None) for i in range(20)])
            for i, text in enumerate(got):
                self.assertTrue(whole.startswith(text) if i % 2 else text == whole, text)
            task = asyncio.create_task(c.completions.create(model=MODEL, prompt=PROMPT, max_tokens=450))
            await asyncio.sleep(0.01)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            self.assertEqual(await read(), whole)


class Lifetimes(unittest.TestCase):
    def test_cancel_mid_stream_then_again(self):
        c = client()
        for _ in range(5):
            s = c.completions.create(model=MODEL, prompt=PROMPT, max_tokens=400, stream=True)
            next(iter(s))
            s.close()
        r = c.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
        self.assertEqual(r.usage.completion_tokens, 8)

    def test_client_timeout_is_the_clients(self):
        with self.assertRaises(openai.APITimeoutError):
            client(timeout=0.001).completions.create(model=MODEL, prompt=PROMPT, max_tokens=400)

    def test_parallel(self):
        c = client()
        def one(_):
            return c.completions.create(model=MODEL, prompt=PROMPT, max_tokens=32, temperature=0).choices[0].text
        with concurrent.futures.ThreadPoolExecutor(16) as ex:
            self.assertEqual(len(set(ex.map(one, range(50)))), 1)

    def test_retries_reach_a_late_server(self):
        import socket, threading
        hold = socket.socket(); hold.bind(("127.0.0.1", 0)); port = hold.getsockname()[1]; hold.close()
        def serve_late():
            time.sleep(0.7)
            host, p = URL.split("//")[1].split(":")
            ls = socket.create_server(("127.0.0.1", port)); ls.settimeout(20)
            conn, _ = ls.accept()
            up = socket.create_connection((host, int(p)))
            def pump(a, b):
                try:
                    while (d := a.recv(65536)):
                        b.sendall(d)
                except OSError:
                    pass
            t = threading.Thread(target=pump, args=(up, conn), daemon=True); t.start(); pump(conn, up)
            ls.close(); up.close(); conn.close()
        t = threading.Thread(target=serve_late, daemon=True); t.start()
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=5, timeout=10) as c:
            r = c.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2, temperature=0)
        self.assertEqual(r.usage.completion_tokens, 2)

    def test_models(self):
        self.assertIn(MODEL, [m.id for m in client().models.list()])


if __name__ == "__main__":
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # its test case says what was slow
    unittest.main(verbosity=1)
