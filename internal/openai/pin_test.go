package openai_test

import (
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
)

func TestPin(t *testing.T) {
	for _, c := range []struct {
		body string
		ends bool
		want openai.Pin
	}{
		{`{"prompt":"x","ttl_s":0.5}`, false, openai.Pin{TTL: time.Second / 2}},
		{`{"prompt":[1,2],"ttl_s":2678400,"messages":null}`, false, openai.Pin{TTL: openai.LongestPin}},
		{`{"messages":[],"ttl_s":1e1}`, false, openai.Pin{TTL: 10 * time.Second, Chat: true}},
		// A whole request can be pinned as it is.
		{`{"prompt":"x","ttl_s":1,"model":"m","cache_salt":"s","cache_priority":9,"max_tokens":5,"temperature":0,"stream":true,"stream_options":{},"seed":1,"echo":true,"user":"u","priority":1}`, false, openai.Pin{TTL: time.Second}},
		{`{"messages":[],"ttl_s":1,"tools":[],"tool_choice":"auto","chat_template_kwargs":{},"top_logprobs":1,"max_completion_tokens":1,"response_format":{},"service_tier":"flex"}`, false, openai.Pin{TTL: time.Second, Chat: true}},
		{`{"prompt":"x","ttl_s":1,"cache":"team-a"}`, false, openai.Pin{TTL: time.Second, Cache: "team-a"}},
		{`{"id":"00"}`, true, openai.Pin{ID: "00"}},
		{`{"prompt":"x","ttl_s":5}`, true, openai.Pin{TTL: 5 * time.Second}},
	} {
		if got, err := openai.ParsePin([]byte(c.body), c.ends); err != nil || got != c.want {
			t.Errorf("%s: %+v, %v", c.body, got, err)
		}
	}
}

func TestBadPins(t *testing.T) {
	for _, c := range []struct {
		body           string
		ends           bool
		param, message string
	}{
		{"", false, "", `the body must be JSON: it is empty; send {"prompt": "You are …", "ttl_s": 3600}`},
		{" \n", true, "", `the body must be JSON: it is empty; send {"id": "…"} or {"prompt": "You are …"}`},
		{"nonsense", true, "", "the body must be JSON: invalid literal at byte 0; send "},
		{"{", false, "", "the body must be JSON: expected a string at byte 1; send "},
		{"[]", false, "", "the body must be JSON: the body must be a JSON object; send "},
		{"\xff", false, "", "the body must be JSON: the body is not valid UTF-8; send "},
		{`{"promp":"x"}`, false, "promp", "promp is unknown; send "},
		{`{"promp":"x"}`, true, "promp", "promp is unknown; send "},
		{`{"prompt":"x","ttl_s":5,"cache_slt":"s"}`, false, "cache_slt", "cache_slt is unknown"},
		{`{"prompt":"x","TTL_S":5}`, false, "TTL_S", "TTL_S is unknown"},
		{`{"` + strings.Repeat("x", 100) + `":1}`, false, strings.Repeat("x", 40) + "…", "x… is unknown"},
		{`{}`, false, "prompt", "prompt or messages is required"},
		{`{"prompt":null,"ttl_s":5}`, false, "prompt", "prompt or messages is required"},
		{`{"prompt":"x"}`, false, "ttl_s", "ttl_s is required"},
		{`{"prompt":"x","ttl_s":null}`, false, "ttl_s", "ttl_s is required"},
		{`{"prompt":"x","ttl_s":0}`, false, "ttl_s", "above 0 and at most 2678400, not 0"},
		{`{"prompt":"x","ttl_s":-1}`, false, "ttl_s", "above 0"},
		{`{"prompt":"x","ttl_s":1e400}`, false, "ttl_s", "at most 2678400"},
		{`{"prompt":"x","ttl_s":"5"}`, false, "ttl_s", "a number of seconds, not a string"},
		{`{}`, true, "id", "id, prompt or messages is required"},
		{`{"ttl_s":5}`, true, "id", "id, prompt or messages is required"},
		{`{"id":5}`, true, "id", "id must be a string"},
	} {
		_, err := openai.ParsePin([]byte(c.body), c.ends)
		if err == nil || err.Status != 400 || err.Param != c.param || !strings.Contains(err.Message, c.message) {
			t.Errorf("%s: %+v", c.body, err)
		}
	}
}
