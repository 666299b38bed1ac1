package grammar

import (
	"encoding/json"
	"math/rand/v2"
	"testing"
)

func TestChoice(t *testing.T) {
	v := small("pos", "posi", "tive", "neg", "positive")
	g := compile(t, Choice, `["positive","negative","neg","pos\u00e9",""]`, v)
	for text, want := range map[string]bool{"positive": true, "neg": true, "negative": true, "posé": true, "": true, "posi": false, "x": false} {
		if matches(g, text) != want {
			t.Errorf("%q: %v", text, !want)
		}
	}
	walk(t, g, v, rand.New(rand.NewPCG(1, 1)), 5)
	for _, bad := range []string{``, `{}`, `[]`, `[1]`, `["a"`} {
		if _, err := Compile(Spec{Kind: Choice, Text: bad}, v, Limits{}); err == nil {
			t.Errorf("%s is taken", bad)
		}
	}
}

func TestJSONObject(t *testing.T) {
	v := small(jsonish...)
	g := compile(t, JSONObject, "", v)
	rnd := rand.New(rand.NewPCG(5, 6))
	members := []string{
		`{}`, `{ }`, `{"a":1}`, `{"a" : [1, 2, {"b": null}], "c":"d\n\u0000é"}`, `{"a":{"b":{"c":[[[]]]}}}`, `{"":-0.5e+10}`, "{\n  \"a\": true\n}",
	}
	for _, text := range members {
		if !json.Valid([]byte(text)) || !matches(g, text) {
			t.Errorf("%s is no member", text)
		}
		for range 20 {
			if !feed(t, g.Matcher(), v, text, rnd) {
				t.Errorf("%s is not allowed token by token", text)
			}
		}
	}
	for _, text := range []string{``, `[]`, ` {}`, `{} `, `{"a"}`, `{"a":01}`, `{"a":1,}`, `{,}`, `{"a":"\x"}`, `{"a":'b'}`, "{\"a\":\"\n\"}", `{"a":+1}`} {
		if matches(g, text) {
			t.Errorf("%s is a member", text)
		}
	}
	whole := 0
	for range 40 {
		text, ended := walk(t, g, v, rnd, 12)
		if ended {
			whole++
			if !json.Valid([]byte(text)) {
				t.Errorf("%q is not JSON", text)
			}
		}
	}
	if whole < 10 {
		t.Errorf("only %d of 40 walks ended", whole)
	}
}

func TestClone(t *testing.T) {
	v := small(jsonish...)
	m := compile(t, JSONObject, "", v).Matcher()
	for _, b := range []byte(`{"a":[`) {
		m.Accept(int32(b))
	}
	c := m.Clone()
	for _, b := range []byte(`{"b":1}]}`) {
		if !c.Accept(int32(b)) {
			t.Fatalf("%c is not accepted", b)
		}
	}
	if !c.MayEnd() || m.MayEnd() {
		t.Fatal("a clone and its origin are not apart")
	}
	end := v.ends[0]
	if !c.Accept(end) || !c.Ended() || c.MayEnd() || c.Accept(end) || c.Accept('}') {
		t.Fatal("a text goes on behind its end")
	}
	if m.Accept(end) || !m.Accept(']') {
		t.Fatal("the origin of a clone that ended is not as it was")
	}
}
