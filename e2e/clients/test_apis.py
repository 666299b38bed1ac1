"""The official Python libraries of OpenAI (responses) and Anthropic (messages), unmodified, against a model
that thinks and calls tools.

Run by scripts/clients, which makes the model (caller.py), starts xpyd and sets XPYD_URL.
"""
import os
import time
import unittest

import anthropic
import openai

URL, MODEL = os.environ["XPYD_URL"], os.environ["XPYD_MODEL"]
RESPONSES = openai.OpenAI(base_url=URL + "/v1", api_key="unused", max_retries=0, timeout=30).responses
CLAUDE = anthropic.Anthropic(base_url=URL, api_key="unused", max_retries=0, timeout=30)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTIONS = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("weather", "clock")]
TOOLS = [{"name": name, "description": "It tells.", "input_schema": SCHEMA} for name in ("weather", "clock")]
ASK = "How warm is it?"
CALLS = [("weather", '{"city": "Oslo", "days": 2}'), ("clock", "{}")]
INPUTS = [("weather", {"city": "Oslo", "days": 2}), ("clock", {})]
THOUGHT, ANSWER = "\nOslo it is.\n", "It is 21 degrees."


def called(response):
    return [(item.name, item.arguments) for item in response.output if item.type == "function_call"]


class Responses(unittest.TestCase):
    def ask(self, **more):
        return RESPONSES.create(**{"model": MODEL, "input": ASK, **more})

    def test_text(self):
        r = self.ask(instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, max_output_tokens=50, user="u")
        self.assertEqual((r.status, r.output_text, r.model, r.metadata, r.temperature, r.instructions), ("completed", ANSWER, MODEL, {"a": "b"}, 0.5, "Be brief."))
        self.assertEqual((r.usage.output_tokens, r.usage.total_tokens), (3, r.usage.input_tokens + 3))

    def test_cut(self):
        r = self.ask(max_output_tokens=1)
        self.assertEqual((r.status, r.incomplete_details.reason, r.output_text), ("incomplete", "max_output_tokens", "It is "))

    def test_tools(self):
        r = self.ask(tools=FUNCTIONS)
        self.assertEqual(called(r), CALLS)
        self.assertEqual((r.output[0].type, r.output[0].content[0].text), ("reasoning", THOUGHT))
        self.assertEqual(r.usage.output_tokens_details.reasoning_tokens, 4)
        history = [{"role": "user", "content": ASK}] + r.output
        history += [{"type": "function_call_output", "call_id": c.call_id, "output": "21"} for c in r.output if c.type == "function_call"]
        self.assertEqual(self.ask(input=history, tools=FUNCTIONS, store=False).output_text, ANSWER)
        results = [{"type": "function_call_output", "call_id": c.call_id, "output": "21"} for c in r.output if c.type == "function_call"]
        last = self.ask(input=results, tools=FUNCTIONS, previous_response_id=r.id)
        self.assertEqual((last.output_text, last.previous_response_id), (ANSWER, r.id))

    def test_stream(self):
        kinds, text = [], ""
        with RESPONSES.stream(model=MODEL, input=ASK) as stream:
            for n, event in enumerate(stream):
                kinds.append(event.type)
                if event.type == "response.output_text.delta":
                    text += event.delta
            final = stream.get_final_response()
        self.assertEqual((text, final.output_text, final.status), (ANSWER, ANSWER, "completed"))
        self.assertEqual(kinds[:4] + kinds[-4:], ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
                                                  "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"])

    def test_stream_tools(self):
        numbers, deltas, thoughts, final = [], {}, "", None
        for event in self.ask(tools=FUNCTIONS, stream=True):
            numbers.append(event.sequence_number)
            if event.type == "response.function_call_arguments.delta":
                deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
            elif event.type == "response.reasoning_text.delta":
                thoughts += event.delta
            elif event.type == "response.completed":
                final = event.response
        self.assertEqual(numbers, list(range(len(numbers))))
        self.assertEqual((list(deltas.values()), thoughts, called(final)), ([a for _, a in CALLS], THOUGHT, CALLS))

    def test_summary(self):
        r = self.ask(tools=FUNCTIONS, reasoning={"summary": "auto"})
        self.assertEqual((r.output[0].summary[0].text, r.output[0].content), (THOUGHT, []))

    def test_logprobs(self):
        r = self.ask(include=["message.output_text.logprobs"], top_logprobs=2)
        probs = r.output[0].content[0].logprobs
        self.assertEqual(([p.token for p in probs][:2], len(probs[0].top_logprobs)), (["It is ", "21 degrees."], 2))

    def test_kept(self):
        r = self.ask(input=[{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
        self.assertEqual(RESPONSES.retrieve(r.id).output_text, ANSWER)
        items = RESPONSES.input_items.list(r.id, order="asc", limit=1)
        self.assertEqual([item.content[0].text for item in items], ["one", "two"])
        with self.assertRaises(openai.BadRequestError):
            RESPONSES.cancel(r.id)
        RESPONSES.delete(r.id)
        for gone in (lambda: RESPONSES.retrieve(r.id), lambda: self.ask(previous_response_id=r.id), lambda: RESPONSES.retrieve(self.ask(store=False).id)):
            with self.assertRaises(openai.NotFoundError):
                gone()

    def test_background(self):
        r = self.ask(background=True)
        self.assertEqual((r.status, r.background), ("queued", True))
        for _ in range(600):
            r = RESPONSES.retrieve(r.id)
            if r.status not in ("queued", "in_progress"):
                break
            time.sleep(0.05)
        self.assertEqual((r.status, r.output_text, RESPONSES.cancel(r.id).status), ("completed", ANSWER, "completed"))
        events = list(self.ask(background=True, stream=True))
        self.assertEqual([e.type for e in events[:3]], ["response.created", "response.queued", "response.in_progress"])
        again = list(RESPONSES.retrieve(events[0].response.id, stream=True, starting_after=2))
        self.assertEqual([e.sequence_number for e in again], list(range(3, len(events))))
        self.assertEqual(again[-1].response.output_text, ANSWER)

    def test_refused(self):
        for field, value, param in (("tools", [{"type": "web_search"}], "tools[0].type"), ("truncation", "auto", "truncation"),
                                    ("max_output_tokens", 0, "max_output_tokens")):
            with self.assertRaises(openai.BadRequestError) as e:
                self.ask(**{field: value})
            self.assertEqual(e.exception.param, param)
        with self.assertRaises(openai.NotFoundError):
            self.ask(model="none")


class Messages(unittest.TestCase):
    def ask(self, **more):
        return {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": ASK}], **more}

    def create(self, **more):
        return CLAUDE.messages.create(**self.ask(**more))

    def test_text(self):
        m = self.create(system="Be brief.", extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9}, metadata={"user_id": "u"})
        self.assertEqual((m.type, m.role, m.model, m.content[0].text, m.stop_reason), ("message", "assistant", MODEL, ANSWER, "end_turn"))
        self.assertEqual(m.usage.output_tokens, 3)

    def test_ends(self):
        self.assertEqual(self.create(max_tokens=1).stop_reason, "max_tokens")
        m = self.create(stop_sequences=["degrees"])
        self.assertEqual((m.stop_reason, m.stop_sequence, m.content[0].text), ("stop_sequence", "degrees", "It is 21 "))

    def test_tools(self):
        m = self.create(tools=TOOLS)
        self.assertEqual(m.stop_reason, "tool_use")
        self.assertEqual((m.content[0].type, m.content[0].thinking), ("thinking", THOUGHT))
        uses = [b for b in m.content if b.type == "tool_use"]
        self.assertEqual([(b.name, b.input) for b in uses], INPUTS)
        results = [{"type": "tool_result", "tool_use_id": b.id, "content": [{"type": "text", "text": "21"}]} for b in uses]
        last = self.create(tools=TOOLS, messages=[{"role": "user", "content": ASK}, {"role": "assistant", "content": m.content}, {"role": "user", "content": results}])
        self.assertEqual((last.stop_reason, last.content[0].text), ("end_turn", ANSWER))

    def test_stream(self):
        with CLAUDE.messages.stream(**self.ask()) as stream:
            text = "".join(stream.text_stream)
            m = stream.get_final_message()
        self.assertEqual((text, m.content[0].text, m.stop_reason, m.usage.output_tokens), (ANSWER, ANSWER, "end_turn", 3))

    def test_stream_tools(self):
        kinds = []
        with CLAUDE.messages.stream(**self.ask(tools=TOOLS)) as stream:
            for event in stream:
                kinds.append(event.type)
            m = stream.get_final_message()
        self.assertEqual((kinds[0], kinds[-1]), ("message_start", "message_stop"))
        self.assertEqual((m.content[0].thinking, [(b.name, b.input) for b in m.content[1:]], m.stop_reason), (THOUGHT, INPUTS, "tool_use"))

    def test_count(self):
        n = CLAUDE.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": ASK}], tools=TOOLS).input_tokens
        u = self.create(tools=TOOLS).usage
        self.assertEqual(n, u.input_tokens + u.cache_read_input_tokens)

    def test_refused(self):
        with self.assertRaises(anthropic.BadRequestError) as e:
            self.create(tools=[{"type": "web_search_20250305", "name": "web_search"}])
        self.assertEqual(e.exception.body["error"]["type"], "invalid_request_error")
        with self.assertRaises(anthropic.NotFoundError) as e:
            self.create(model="none")
        self.assertEqual(e.exception.body["error"]["type"], "not_found_error")


if __name__ == "__main__":
    unittest.main(verbosity=2)
