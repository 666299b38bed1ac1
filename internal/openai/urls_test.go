package openai_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/openai"
)

// TestURLs: every address that an engine would fetch is found, however its
// name is spelt, and nothing else is.
func TestURLs(t *testing.T) {
	f := func(body string, want ...string) {
		t.Helper()
		top, err := openai.Scan([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(top.URLs, want) {
			t.Errorf("%s: %q", body, top.URLs)
		}
	}
	part := func(member string) string {
		return `{"messages":[{"role":"user","content":[{"type":"text","text":"http://a/"},{"type":"x",` + member + `}]}]}`
	}
	f(part(`"image_url":{"url":"http://h/1.png"}`), "http://h/1.png")
	f(part(`"image_url":"http://h/1.png"`), "http://h/1.png")
	f(part(`"video_url":{"url":"file:///etc/passwd"}`), "file:///etc/passwd")
	f(part(`"audio_url":{"url":"HTTP:\/\/h"}`), "HTTP://h")
	f(part(`"image_\u0075rl":{"\u0075rl":"http://h"}`), "http://h")
	f(part(`"image_url":{"url":"http://h","url":"http://i"}`), "http://h", "http://i")
	f(part(`"image_url":{"url":"data:image/png;base64,AAAA"}`))
	f(part(`"image_url":{"url":null}`))
	f(part(`"curl":"http://h"`))
	f(`{"messages":"http://h","metadata":{"url":"http://h"},"prompt":"x"}`)
	f(`{"input":[{"type":"input_image","image_url":"http://h"},{"type":"input_file","file_url":"http://i"}]}`, "http://h", "http://i")
	f(`{"tools":[{"type":"mcp","server_url":"http://h"},{"type":"function","function":{"parameters":{"properties":{"url":{"type":"string"}},"examples":[{"url":"http://x"}]}}}]}`, "http://h")
	many := part(`"m":[` + strings.Repeat(`{"url":"http://h"},`, 1024) + `0]`)
	if top, err := openai.Scan([]byte(many)); err != nil || len(top.URLs) != 1024 {
		t.Errorf("%d, %v", len(top.URLs), err)
	}
	many = part(`"m":[` + strings.Repeat(`{"url":"http://h"},`, 1025) + `0]`)
	if _, err := openai.Scan([]byte(many)); err == nil || err.Status != 400 {
		t.Errorf("%v", err)
	}
}

func TestPriorityFields(t *testing.T) {
	top, err := openai.Scan([]byte(`{"priority":-3,"service_tier":"flex"}`))
	if err != nil || top.Priority != -3 || !top.HasPriority || top.Tier != "flex" {
		t.Errorf("%+v %v", top, err)
	}
	top, err = openai.Scan([]byte(`{"priority":null,"service_tier":null}`))
	if err != nil || top.HasPriority || top.Tier != "" {
		t.Errorf("%+v %v", top, err)
	}
	for _, body := range []string{`{"priority":"high"}`, `{"priority":1.5}`, `{"service_tier":3}`} {
		if _, err := openai.Scan([]byte(body)); err == nil || err.Param == "" {
			t.Errorf("%s: %v", body, err)
		}
	}
	body := []byte(`{"a":1, "priority" : -3}`)
	top, _ = openai.Scan(body)
	e := openai.NewEdit(body, &top)
	e.Replace(openai.PriorityField, "0")
	if got := string(slices.Concat(e.Parts()...)); got != `{"a":1, "priority" : 0}` {
		t.Errorf("%s", got)
	}
}

func TestReadTokens(t *testing.T) {
	f := func(body string, p, c int, ok bool) {
		t.Helper()
		if gp, gc, gok := openai.ReadTokens([]byte(body)); gp != p || gc != c || gok != ok {
			t.Errorf("%s: %d %d %v", body, gp, gc, gok)
		}
	}
	f(`{"usage":{"prompt_tokens":3,"completion_tokens":4}}`, 3, 4, true)
	f(`{"usage":{"prompt_tokens":3}}`, 3, 0, true)
	f(`{"usage":{"prompt_tokens":0,"completion_tokens":0}}`, 0, 0, true)
	f(`{"usage":{"prompt_tokens":3,"completion_tokens":-4}}`, 3, 0, true)
	f(`{"usage":{"prompt_tokens":3,"completion_tokens":99999999999999999999}}`, 3, 0, true)
	f(`{"usage":{"prompt_tokens":-1}}`, 0, 0, false)
	f(`{"usage":{"total_tokens":7}}`, 0, 0, false)
	f("data: {\"usage\":{\"prompt_tokens\":0,\"completion_tokens\":1}}\n\n", 0, 1, true)
	f(`{"usage":null}`, 0, 0, false)
	f("data: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":1}}\n\ndata: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n", 3, 2, true)
	f("data: {\"usage\":null}\n\n", 0, 0, false)
	f(`{"usage": {"input_tokens": 3, "output_tokens": 4}}`, 3, 4, true)
	f("data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 3, \"completion_tokens\": 4}}\r\n\r\ndata: {\"usage\": null}\r\n\r\n", 3, 4, true)
	f("event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"output\":[],\"usage\":{\"input_tokens\":3,\"output_tokens\":4}}}\n\n", 3, 4, true)
	f("event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":3}}}\n\n", 3, 0, true)
	f("event: message_delta\ndata: {\"usage\":{\"output_tokens\":4}}\n\n", 0, 4, true)
	f("event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":3}}}\n\nevent: message_delta\ndata: {\"usage\":{\"output_tokens\":4}}\n\n", 3, 4, true)
	f("data: {\"text\":\"\\\"usage\\\":{\"}\n\n", 0, 0, false)
	f("", 0, 0, false)
}
