package router

import (
	"encoding/json"
	"testing"

	"github.com/xpyd/xpyd/internal/openai"
)

func TestSkim(t *testing.T) {
	f := func(in, model, link string) {
		t.Helper()
		for _, step := range []int{1, 3, len(in) + 1} {
			s := &skim{}
			for i := 0; i < len(in); i += step {
				_, _ = s.Write([]byte(in[i:min(i+step, len(in))]))
			}
			if s.model != model || s.link != link {
				t.Errorf("%s by %d: %q %q", in, step, s.model, s.link)
			}
		}
	}
	f(`{"model":"m"}`, "m", "")
	f(` { "a" : {"model":"x","bootstrap_room":1}, "model" : "m" }`, "m", "")
	f(`{"a":["model","x"],"b":"model","model":"m"}`, "m", "")
	f(`{"a":"\",\"model\":\"x","model":"m\u00e9\\"}`, `mé\`, "")
	f(`{"mod\u0065l":"m","kv_transfer\u005fparams":null}`, "m", "kv_transfer_params")
	f(`["model","m"]`, "", "")
	f(`{"model":3,"x":"y"}`, "", "")
	f(`{"model":{"a":"b"},"c":"d"}`, "", "")
	f(`{"model":"m`, "", "")
	for _, name := range linkFields {
		f(`{"`+name+`":1}`, "", name)
		if top, err := openai.Scan([]byte(`{"`+name+`":{}}`), openai.Limits{}); err != nil || top.Link != name {
			t.Errorf("%s: %q %v", name, top.Link, err)
		}
	}
}

// FuzzSkim: of what is JSON it reads what encoding/json reads.
func FuzzSkim(f *testing.F) {
	f.Add([]byte(`{"model":"m","x":[{"model":"y"}],"bootstrap_port":1}`))
	f.Add([]byte(`{"model":"a\"\u0041","model":"b"}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		s := &skim{}
		_, _ = s.Write(in)
		var v map[string]json.RawMessage
		if json.Unmarshal(in, &v) != nil || len(in) > maxToken {
			return
		}
		linked := false
		for _, name := range linkFields {
			_, has := v[name]
			linked = linked || has
		}
		if linked != (s.link != "") {
			t.Fatalf("%q: link %q", in, s.link)
		}
		var model string
		if json.Unmarshal(v["model"], &model) == nil && s.model != model && v["model"][0] == '"' {
			t.Fatalf("%q: model %q, want %q", in, s.model, model)
		}
	})
}
