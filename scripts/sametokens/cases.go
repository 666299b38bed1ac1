package main

import (
	"fmt"
	"maps"
	"strings"
)

// testCase is one request.
type testCase struct {
	name, path string
	body       map[string]any
}

func (c *testCase) stream() bool { return c.body["stream"] == true }

// cases returns the requests, each streamed and not: greedy, with sampled some with a seed.
func cases(model string, chat, sampled bool) []testCase {
	var out []testCase
	add := func(name, path string, fields map[string]any) {
		for _, stream := range []bool{false, true} {
			c := testCase{name, path, map[string]any{"model": model, "temperature": 0, "max_tokens": 24, "return_token_ids": true}}
			maps.Copy(c.body, fields)
			if stream {
				c.name += ", streamed"
				c.body["stream"], c.body["stream_options"] = true, map[string]any{"include_usage": true}
			}
			out = append(out, c)
		}
	}
	const text = "/v1/completions"
	long := ""
	for i := range 12 {
		long += fmt.Sprintf("%d. Once upon a time there was a little dog who lived in house %d. ", i, i*7)
	}
	add("a short prompt", text, map[string]any{"prompt": "Once upon a time"})
	add("a prompt of many blocks", text, map[string]any{"prompt": long})
	add("the same beginning, another end", text, map[string]any{"prompt": long[:len(long)/2] + "And then"})
	add("token ids", text, map[string]any{"prompt": []int{403, 407, 261, 378, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20}})
	add("one token", text, map[string]any{"prompt": "The", "max_tokens": 1})
	add("other scripts", text, map[string]any{"prompt": "żółć Ünïcode 漢字 🙂 " + strings.Repeat("é", 40)})
	add("log probabilities", text, map[string]any{"prompt": "Lily and Tom", "logprobs": 3})
	add("a batch", text, map[string]any{"prompt": []string{"The dog", "The bird sang"}})
	add("a penalty", text, map[string]any{"prompt": "One day", "repetition_penalty": 1.3, "presence_penalty": 0.5})
	if sampled {
		add("sampled with a seed", text, map[string]any{"prompt": "Once upon a time", "temperature": 0.9, "top_p": 0.95, "seed": 42})
		add("two choices", text, map[string]any{"prompt": "The cat", "n": 2, "temperature": 0.9, "seed": 7})
	}
	if chat {
		const path = "/v1/chat/completions"
		hello := []map[string]string{{"role": "system", "content": "You tell stories."}, {"role": "user", "content": "Hello, who are you?"}}
		add("chat", path, map[string]any{"messages": hello})
		add("chat, max_completion_tokens", path, map[string]any{"messages": hello, "max_completion_tokens": 8})
		add("chat, two turns", path, map[string]any{"messages": append(hello[:2:2], map[string]string{"role": "assistant", "content": long[:200]},
			map[string]string{"role": "user", "content": "Go on."})})
	}
	return out
}
